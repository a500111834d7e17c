"""The exit code says that a save failed if no caller has learned of it, and changes nothing else about the exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit, os, sys, time
atexit.register(print, "handled first")
left = open(sys.argv[1] + ".left", "w")
import torch
from shoal.checkpoint import Piece, Writer

atexit.register(print, "handled")
pieces = [Piece(name="a", shape=(2,), start=0, stop=2, data=torch.zeros(2))]
left.write("buffered")
pending = Writer(optional=sys.argv[2] == "optional").write(sys.argv[1] + "/below", "tag", pieces)
"""

WAYS = {
    "ends": ("", 1),
    "ends later": ("pending.wait_until_ended()", 1),
    "optional": ("", 0),
    "learns": ("try:\n    pending.wait()\nexcept Exception:\n    pass", 0),
    "raises": ("raise KeyboardInterrupt", 130),
    "forks": ("pending.wait_until_ended()\nleft.flush()\npid = os.fork()\n"
              "if pid:\n    pending.mark_reported()\n    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))", 0),
}


def end(path: Path, way: str, script: str = SCRIPT) -> tuple[int, str, str]:
    """Run a script whose save fails, because its folder lies below a file; return the code, the output and the errors."""
    path.write_text("")
    done = subprocess.run([sys.executable, "-c", script + WAYS[way][0], str(path), way], capture_output=True, text=True,
                          check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return 128 - done.returncode if done.returncode < 0 else done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_the_exit_code_is_1_if_no_caller_learns_of_a_failed_save(tmp_path: Path, way: str) -> None:
    code, out, err = end(tmp_path / "file", way)
    assert code == WAYS[way][1], err
    assert out.splitlines()[:2] == ["handled", "handled first"]
    assert (tmp_path / "file.left").read_text() == "buffered"
    assert err.count("Not a directory") == 1
    assert ("Traceback" in err) is (way == "raises")
