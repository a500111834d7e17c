"""The late device, loaded where this module is imported: by the fork server of a run, so that its ranks need not load it."""

from __future__ import annotations

from tests.late.build import NoCompiler
from tests.late.group import register

try:
    register()
except NoCompiler as error:
    raise ImportError(str(error)) from error  # which the server leaves to the ranks, to raise as their own
