"""Run an example as `python` would, on ranks that have torch loaded: by `shoal run` the start of each takes seconds."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

from shoal.testing import run_ranks


def run_script(script: Path, ranks: int, *options: str, folder: Path) -> str:
    """Run `script` in `folder` on each of `ranks` ranks, and return what they printed, rank by rank."""
    return "".join(run_ranks(ranks, _run, script, options, folder))


def _run(script: Path, options: tuple[str, ...], folder: Path) -> str:
    os.chdir(folder)
    sys.argv = [str(script), *options]
    sys.path.insert(0, str(script.parent))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(script), run_name="__main__")
    return said.getvalue()
