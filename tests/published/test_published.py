"""Shoal under the published name shows what DeepSpeed 0.19.8 showed, in every case that was recorded from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .case import verdict

HERE = Path(__file__).parent
RECORDED: dict[str, Any] = json.loads((HERE / "recorded.json").read_text())

BY_DESIGN = {
    "on_launcher.resources[(' worker-0', '')]": "spaces around the name of a host are taken off",
    "on_recompute.configured[contiguous_checkpointing]": "a call of configure that raises configures nothing",
}
"""Cases in which Shoal does something else than DeepSpeed, and why."""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each recorded case shows here."""
    folder = tmp_path_factory.mktemp("published")
    names, out = folder / "names", folder / "out"
    names.write_text(json.dumps(list(RECORDED)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.published.worker", str(names), str(out)],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(line) for line in out.read_text().splitlines())


@pytest.mark.parametrize("name", RECORDED, ids=str)
def test_a_recorded_case_shows_the_same(name: str, shown: dict[str, Any]) -> None:
    found = verdict(shown[name], RECORDED[name])
    if name in BY_DESIGN:
        assert found
    else:
        assert not found
