"""Fixtures: a swap file on a real disk, and gates that block or fail real requests."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.tier.swap import Swap


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[Swap]:
    """A swap file with requests of 8 KiB; it must leave no file behind."""
    created = Swap(tmp_path, block_bytes=8192, requests=4)
    yield created
    created.close()
    assert list(tmp_path.iterdir()) == []


class Gate:
    """Replaces a function of `os`: calls block while the gate is closed, and raise `error` if it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str):
        self.open = threading.Event()
        self.open.set()
        self.error: OSError | None = None
        self.calls = 0
        self._call = getattr(os, name)
        monkeypatch.setattr(os, name, self._pass)

    def _pass(self, *args: Any) -> Any:
        self.calls += 1
        self.open.wait()
        if self.error is not None:
            raise self.error
        return self._call(*args)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, swap: Swap) -> Iterator[Gate]:
    """The gate of all reads."""
    gate = Gate(monkeypatch, "preadv")
    yield gate
    gate.open.set()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch, swap: Swap) -> Iterator[Gate]:
    """The gate of all writes."""
    gate = Gate(monkeypatch, "pwritev")
    yield gate
    gate.open.set()
