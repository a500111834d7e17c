"""Ranks that are stopped or hung end and restart, spares take their place, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.launch.orphans import MARK, memory_folder
from shoal.launch.rank import SPARE
from shoal.launch.watching import current_first
from shoal.recording.page import PAGES

TRAIN = """
import os, sys, time, torch, shoal
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
seed = torch.initial_seed()
torch.manual_seed(0)
engine, *_ = shoal.initialize(model=torch.nn.Linear(64, 64), config=config)
rank, attempt = engine.global_rank, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
steps = 12 if attempt else 10**6
while engine.global_steps < steps:
    engine.backward(engine(torch.ones(1, 64)).square().mean())
    engine.step()
    if engine.global_steps in (1, 6):
        with open("/proc/self/environ", "rb") as file:
            forked = b"SHOAL_SPARE=" in file.read()
        os.write(1, f"step {engine.global_steps} rank {rank} {os.getpid()} {attempt} {forked} {seed}\\n".encode())
    FAULT
    time.sleep(0.02)
os.write(1, f"done {rank} {attempt}\\n".encode())
"""
HANG = "if rank == 1 and attempt == 0 and engine.global_steps == 8: hung = time.sleep(1000)"
"""Hangs outside of the engine, while rank 0 waits for it in a collective."""


def pids(lines: list[str]) -> dict[int, int]:
    return {int(words[3]): int(words[4]) for words in map(str.split, lines) if words[:2] == ["step", "6"]}


def is_spare(pid: int) -> bool:
    try:
        return f"{SPARE}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_the_stack_of_the_current_thread_comes_first():
    others = ["Thread 0x01 (most recent call first):\n  File \"a.py\", line 1 in a", "Thread 0x02 ...\n  File b"]
    main_thread = "Current thread 0x03 (most recent call first):\n  File \"c.py\", line 3 in <module>"
    text = "\n\n".join([*others, main_thread]) + "\n"
    assert current_first(text) == "\n\n".join([main_thread, *others]) + "\n"
    assert current_first("") == ""


def test_what_a_spare_imports_asks_for_no_accelerator() -> None:
    """CUDA cannot be used after a fork of a process that has initialised it."""
    code = """if True:
        import torch.distributed

        def refuse(*args):
            raise AssertionError("asked for an accelerator")

        for module in (torch.cuda, torch.accelerator):
            module.is_available = module.device_count = refuse
        torch.accelerator.current_accelerator = refuse
        import shoal.engine.build
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_stopped_rank_is_killed_and_spares_take_over(run, script):
    launch = run("--ranks", "2", "--max-restarts", "1", script(TRAIN.replace("FAULT", "pass")))
    ranks = pids(launch.read(4))
    deadline = time.monotonic() + 60
    while len(before := launch.family()) < len(ranks) + 1:  # and the spare
        assert time.monotonic() < deadline, before
        time.sleep(0.1)
    os.kill(ranks[1], signal.SIGSTOP)
    code, out, err = launch.end()
    assert code == 0, err
    assert "rank 1 of 2 failed: stopped (state T, as by SIGSTOP)" in err
    assert "leaked" not in err  # as libraries say of objects that the spare has frozen
    after = {int(words[4]): words[7] for words in map(str.split, out.splitlines())
             if words[:2] == ["step", "1"] and words[5:7] == ["1", "True"]}
    assert len(after) == 2
    assert not after.keys() & set(before)
    assert len(set(after.values())) == 2, "random numbers that a script has not seeded are of each rank"
    launch.wait_until_gone()


def test_a_forked_rank_keeps_the_threads_that_its_script_chose(run, script):
    text = TRAIN.replace("FAULT", "pass").replace("seed}", "seed} {torch.get_num_threads()}").replace(
        "12 if attempt else", "12 if attempt == 2 else").replace("config = {", "config = {'log_level': 'info', ")
    launch = run("--ranks", "1", "--max-restarts", "2", script(f"import os\nos.environ['OMP_NUM_THREADS'] = '2'\n{text}"))
    found = list[tuple[str, str, str]]()
    for attempt in range(3):  # what the second attempt was given, the third one is given too
        words = launch.read(2)[-1].split()
        found.append((words[5], words[6], words[8]))
        deadline = time.monotonic() + 60
        while not any(is_spare(pid) for pid in launch.family()):
            assert time.monotonic() < deadline, launch.family()
            time.sleep(0.1)
        if attempt < 2:
            os.kill(int(words[4]), signal.SIGKILL)
    code, _, err = launch.end()
    assert code == 0, err
    assert found == [("0", "False", "2"), ("1", "True", "2"), ("2", "True", "2")]
    assert err.count("computes with 2 threads, as in the last attempt, and not with 1") == 2
    launch.wait_until_gone()


def test_a_spare_that_was_stopped_delays_no_restart(run, script):
    launch = run("--ranks", "2", "--max-restarts", "1", script(TRAIN.replace("FAULT", "pass")))
    ranks = pids(launch.read(4))
    deadline = time.monotonic() + 60
    while not (spares := [pid for pid in launch.family() if pid not in ranks and is_spare(pid)]):
        assert time.monotonic() < deadline, launch.family()
        time.sleep(0.1)
    os.kill(spares[0], signal.SIGSTOP)
    os.kill(ranks[1], signal.SIGKILL)
    code, _, err = launch.end()
    assert code == 0, err
    told = f"does not serve: process {spares[0]} is stopped (state T, as by SIGSTOP). Ranks start without it"
    assert err.count(told) == 1
    launch.wait_until_gone()


def test_a_rank_that_hangs_restarts_and_its_stack_is_shown(run, script):
    launch = run("--ranks", "2", "--max-restarts", "1", "--no-spares", script(TRAIN.replace("FAULT", HANG)))
    code, out, err = launch.end()
    assert code == 0, err
    assert "rank 1 of 2 failed: hung in between after 8 steps" in err
    assert ": the call has lasted 5." in err
    assert "File" in err.split("rank 1 of 2 failed")[1]
    assert sorted(line for line in out.splitlines() if line.startswith("done")) == ["done 0 1", "done 1 1"]
    launch.wait_until_gone()


def test_without_restarts_a_hang_is_reported_and_nothing_is_killed(run, script):
    text = TRAIN.replace("FAULT", HANG.replace("1000", "7")).replace("12 if attempt else 10**6", "12")
    launch = run("--ranks", "2", script(text))
    code, out, err = launch.end()
    assert code == 0, err
    assert err.count("is hung in between after 8 steps") == 1
    assert "it goes on, because --watch does not end it" in err
    assert sorted(out.splitlines()[-2:]) == ["done 0 0", "done 1 0"]


def test_the_memory_of_a_launch_goes_with_it(run, script):
    launch = run("--ranks", "1", script(f"import os; print(os.environ[{MARK!r}], os.path.isdir(os.environ[{PAGES!r}]))"))
    code, out, _ = launch.end()
    mark, was_there = out.split()
    assert (code, was_there) == (0, "True")
    assert not Path(memory_folder(mark)).exists()


@pytest.mark.parametrize(("words", "message"), [
    (("--watch", "restart"), "--watch restart: no restart is allowed"),
    (("--spares",), "--spares: they wait to restart Python programs"),
])
def test_options_that_restart_nothing_are_refused(run, words, message):
    code, _, err = run("--ranks", "1", *words, "x.py").end()
    assert code == 2
    assert message in err


def test_an_exit_that_takes_longer_than_any_call_is_no_hang(run, script):
    at_exit = "import atexit, time; atexit.register(time.sleep, 8)\n"
    launch = run("--ranks", "2", "--max-restarts", "1", "--no-spares",
                 script(at_exit + TRAIN.replace("FAULT", "pass").replace("10**6", "12")))
    code, out, err = launch.end()
    assert code == 0, err
    assert "hung" not in err
    assert "restarting" not in err
    assert sorted(line for line in out.splitlines() if line.startswith("done")) == ["done 0 0", "done 1 0"]
