"""The late device, loaded where this module is imported: by the fork server of a run, so that its ranks need not load it."""

from __future__ import annotations

from tests.late.group import register

register()
