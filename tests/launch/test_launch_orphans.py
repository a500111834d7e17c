"""Orphaned processes of a launch are found by a mark in their environment and killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import wait

from shoal.launch.orphans import MARK, Guardian, is_abandoned, marked, memory_folder, remove_abandoned, sweep

WAIT = """
import signal, sys
if sys.argv[1:]: signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
signal.pause()
"""


def start(mark, *args):
    process = subprocess.Popen([sys.executable, "-c", WAIT, *args], stdout=subprocess.PIPE, env={MARK: mark},
                               start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_only_processes_with_the_mark_are_swept():
    one, other = start("test-one"), start("test-other")
    try:
        assert marked("test-one") == [one.pid]
        sweep("test-one", 60)
        assert one.wait() == -signal.SIGTERM
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_that_ignores_sigterm_is_killed():
    process = start("test-stubborn", "ignore")
    sweep("test-stubborn", 0.1)
    assert process.wait() == -signal.SIGKILL


def test_leaving_the_guardian_succeeds_if_it_was_killed():
    code = ("import os, sys; from shoal.launch.orphans import Guardian\n"
            "with Guardian('test-guardian', '/nonexistent') as guardian: os.kill(guardian.pid, 9)\n"
            "print('left the context')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "left the context\n"
    assert is_abandoned(Path(memory_folder("test-guardian")))
    remove_abandoned()


def test_the_next_launch_removes_what_a_launch_and_its_guardian_left(tmp_path):
    temporary = tmp_path / "shoal-run-test"
    (temporary / "logs").mkdir(parents=True)
    code = ("import os, signal; from shoal.launch.orphans import Guardian\n"
            f"guardian = Guardian('test-both', {str(temporary)!r}); guardian.__enter__(); print(guardian.pid, flush=True)\n"
            "signal.pause()")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    guardian, folder = int(process.stdout.readline()), Path(memory_folder("test-both"))
    remove_abandoned()
    assert folder.is_dir() and not is_abandoned(folder) and temporary.is_dir()
    for pid in (guardian, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    wait(guardian, time.monotonic() + 60)
    assert is_abandoned(folder)
    with Guardian("test-next", "/nonexistent"):
        assert not folder.exists() and not temporary.exists()
    remove_abandoned()
    assert not Path(memory_folder("test-next")).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a folder of another user")
def test_what_another_user_wrote_names_no_folder_to_remove(tmp_path):
    mine, lure = tmp_path / "mine", Path(memory_folder("test-lure"))
    mine.mkdir()
    (tmp_path / "path").write_text(str(mine))
    lure.mkdir()
    (lure / "lock").symlink_to(tmp_path / "path")
    os.chown(lure, 12345, 12345)
    assert is_abandoned(lure)
    remove_abandoned()
    assert mine.is_dir() and not lure.exists()


def test_the_guardian_of_a_killed_launcher_sweeps_and_removes_the_folder(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    process = start("test-killed")
    code = ("import os, sys; from shoal.launch.orphans import Guardian\n"
            f"guardian = Guardian('test-killed', {str(folder)!r}); guardian.__enter__()\n"
            "print(guardian.pid, flush=True); os.kill(os.getpid(), 9)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert process.wait() == -signal.SIGKILL
    wait(int(done.stdout), time.monotonic() + 60)
    assert not folder.exists()
