"""The page of a rank, and stalls of real processes."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch import nn

import shoal
from shoal.launch.printing import are_full
from shoal.recording.page import KEPT, PAGES, RankPage, TrainingPhase, phase_of, read
from shoal.recording.page import page as this_page
from shoal.resilience import watch
from shoal.resilience.processes import FamilyTime, process
from shoal.resilience.watch import StallKind, Watch
from shoal.testing import run_ranks

SLEEPER = "import time; time.sleep(1000)"
SPINNER = "while True: pass"
PTRACE_ATTACH, PTRACE_DETACH = 16, 17


def test_a_page_tells_phase_steps_waits_and_past_durations(tmp_path: Path) -> None:
    page = RankPage()
    begun = time.monotonic()
    page.enter(TrainingPhase.FORWARD)  # without a reader
    page.attach(str(tmp_path), 3)
    assert page.attached
    for step in range(20):
        for phase in (TrainingPhase.FORWARD, TrainingPhase.BACKWARD, TrainingPhase.STEP):
            page.enter(phase, step)
        page.begin_wait(f"gather of unit '{step}'", 1)
        page.end_wait(0)
    page.begin_wait("reduce of unit 'h.1'", 2)
    found = read(str(tmp_path / "rank3"))
    assert found is not None
    assert (found.pid, found.phase, found.steps, found.first) == (os.getpid(), TrainingPhase.STEP, 19, False)
    assert (found.calls, found.waits, found.waits_for) == (61, 2, "reduce of unit 'h.1'")
    assert {phase: len(past) for phase, past in found.past.items()} == {
        TrainingPhase.FORWARD: 16, TrainingPhase.BACKWARD: 16, TrainingPhase.STEP: 16}
    assert all(0 <= seconds <= time.monotonic() - begun for past in found.past.values() for seconds in past)
    assert set(found.trail) == {f"gather of unit '{step}'" for step in range(5, 20)} | {"reduce of unit 'h.1'"}
    assert begun <= found.since <= time.monotonic()


def test_the_first_call_of_a_phase_is_marked_and_not_counted(tmp_path: Path) -> None:
    page = RankPage()
    page.attach(str(tmp_path), 0)
    page.enter(TrainingPhase.FORWARD)
    first = read(str(tmp_path / "rank0"))
    page.enter(TrainingPhase.BACKWARD)
    page.enter(TrainingPhase.FORWARD)
    second = read(str(tmp_path / "rank0"))
    assert first is not None and second is not None
    assert (first.first, second.first, second.past) == (True, False, {})


def test_a_page_that_nobody_wrote_is_no_reading(tmp_path: Path) -> None:
    assert read(str(tmp_path / "rank0")) is None
    (tmp_path / "rank0").write_bytes(b"\0" * 8192)
    assert read(str(tmp_path / "rank0")) is None


def test_engine_calls_have_phases() -> None:
    assert phase_of("forward without gradients") is TrainingPhase.EVALUATE
    assert phase_of("no such call") is TrainingPhase.OTHER


# Verdicts


def enter(folder: str, rank: int, pid: int, phase: TrainingPhase, *, waits: int, calls: int = 3,
          steps: int = 7) -> None:
    """Write the page of `rank` as process `pid` would."""
    page = RankPage()
    page.attach(folder, rank, pid=pid)
    for _ in range(calls):
        page.enter(phase, steps)
    if waits:
        page.begin_wait("gather", waits)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two sleeping processes with pages whose calls are late at once."""
    monkeypatch.setattr(watch, "LEAST", 0.2)
    monkeypatch.setattr(watch, "STOPPED_AFTER", 0.2)
    watched = Watch(str(tmp_path), whole_job=True)
    processes = [subprocess.Popen([sys.executable, "-c", SLEEPER]) for _ in range(2)]
    yield watched, processes
    for each in processes:
        each.kill()
        each.wait()


def verdicts(watched: Watch, processes: list[subprocess.Popen[bytes]], seconds: float = 3.5) -> dict[int, StallKind]:
    """Look for `seconds`, and return all verdicts."""
    found: dict[int, StallKind] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found |= {each.local_rank: each.kind for each in watched.poll(dict(enumerate(p.pid for p in processes)))}
        time.sleep(0.05)
    return found


def test_a_rank_that_waits_is_not_blamed_for_one_that_hangs(pair, tmp_path: Path) -> None:
    watched, processes = pair
    enter(str(tmp_path), 0, processes[0].pid, TrainingPhase.STEP, waits=1)
    enter(str(tmp_path), 1, processes[1].pid, TrainingPhase.BACKWARD, waits=0)
    assert verdicts(watched, processes) == {1: StallKind.HUNG}


def test_where_all_ranks_wait_all_are_hung(pair, tmp_path: Path) -> None:
    watched, processes = pair
    for rank, each in enumerate(processes):
        enter(str(tmp_path), rank, each.pid, TrainingPhase.STEP, waits=1)
    assert verdicts(watched, processes) == {0: StallKind.HUNG, 1: StallKind.HUNG}


def test_a_rank_that_waits_for_one_that_has_ended_is_hung(pair, tmp_path: Path) -> None:
    watched, processes = pair
    enter(str(tmp_path), 0, processes[0].pid, TrainingPhase.STEP, waits=1)
    processes[1].kill()  # a zombie, or gone: its agent keeps it in the list of ranks
    assert verdicts(watched, processes) == {0: StallKind.HUNG}


def test_a_stopped_process_is_told_from_a_hung_one(pair, tmp_path: Path) -> None:
    watched, processes = pair
    os.kill(processes[0].pid, signal.SIGSTOP)
    enter(str(tmp_path), 0, processes[0].pid, TrainingPhase.STEP, waits=0)
    enter(str(tmp_path), 1, processes[1].pid, TrainingPhase.STEP, waits=0)
    assert verdicts(watched, processes) == {0: StallKind.STOPPED, 1: StallKind.HUNG}


def test_while_a_debugger_has_stopped_a_rank_none_is_hung(pair, tmp_path: Path) -> None:
    watched, processes = pair
    for rank, each in enumerate(processes):
        enter(str(tmp_path), rank, each.pid, TrainingPhase.STEP, waits=0)
    ptrace = ctypes.CDLL(None).ptrace
    if ptrace(PTRACE_ATTACH, processes[1].pid, None, None) != 0:
        pytest.skip("needs the right to trace a child process")
    try:
        assert verdicts(watched, processes) == {}
    finally:
        ptrace(PTRACE_DETACH, processes[1].pid, None, None)
    assert verdicts(watched, processes) == {0: StallKind.HUNG, 1: StallKind.HUNG}


def test_a_deadline_that_ended_a_rank_doubles(pair, tmp_path: Path) -> None:
    watched, processes = pair
    enter(str(tmp_path), 0, processes[0].pid, TrainingPhase.STEP, waits=0)
    reading = watched.reading(0)
    assert reading is not None
    before = watched.deadline(0, reading)
    for _ in range(2):  # a second shows that the process is idle, and another that none of those it started works
        assert not watched.poll({0: processes[0].pid})
        time.sleep(1.1)
    (suspicion,) = watched.poll({0: processes[0].pid})
    watched.double(suspicion)
    assert watched.deadline(0, reading) == 2 * before == 0.4
    assert "hung in step after 7 steps" in str(suspicion)


@pytest.mark.parametrize("slow", [False, True])
def test_a_doubled_deadline_is_single_again_unless_the_call_is_slow(slow: bool, pair, tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    watched, processes = pair
    pids, clock = {0: processes[0].pid}, time.monotonic
    monkeypatch.setattr(watch, "LEAST", 100.0)  # far from what a busy machine makes of a moment
    monkeypatch.setattr(watch, "PAUSE", 1e9)

    def deadline_after(steps: int, seconds: float) -> float:
        """Return the deadline of the phase after a call at `steps` that lasted for `seconds`."""
        enter(str(tmp_path), 0, processes[0].pid, TrainingPhase.STEP, waits=0, steps=steps)
        monkeypatch.setattr(watch.time, "monotonic", lambda: clock() + seconds)
        watched.poll(pids)
        monkeypatch.setattr(watch.time, "monotonic", clock)
        reading = watched.reading(0)
        assert reading is not None
        return watched.deadline(0, reading)

    single = deadline_after(7, 0)
    reading = watched.reading(0)
    watched.double(watch.Suspicion(local_rank=0, pid=pids[0], kind=StallKind.HUNG, reading=reading, seconds=9,
                                   deadline=single))
    assert deadline_after(7, 1.5 * single if slow else 0) == 2 * single
    assert deadline_after(8, 0) == (2 * single if slow else single)


def test_a_first_call_has_a_deadline_of_its_own(pair, tmp_path: Path) -> None:
    watched, processes = pair
    enter(str(tmp_path), 0, processes[0].pid, TrainingPhase.STEP, waits=0, calls=1)
    reading = watched.reading(0)
    assert reading is not None
    assert watched.deadline(0, reading) == watch.UNKNOWN
    assert verdicts(watched, processes[:1], 1.5) == {}
    enter(str(tmp_path), 0, processes[0].pid, TrainingPhase.STEP, waits=0, calls=2)
    watched.poll({0: processes[0].pid})
    assert watched.deadline(0, reading) == watch.FIRST_LEAST


@pytest.mark.parametrize("phase", list(TrainingPhase)[TrainingPhase.FORWARD:TrainingPhase.END])
def test_a_late_call_of_a_phase_follows_from_its_median(phase: TrainingPhase, pair, tmp_path: Path) -> None:
    watched, processes = pair
    enter(str(tmp_path), 0, processes[0].pid, phase, waits=0)
    reading = watched.reading(0)
    assert reading is not None
    trains = phase in (TrainingPhase.FORWARD, TrainingPhase.BACKWARD, TrainingPhase.STEP)
    slow = dataclasses.replace(reading, past={phase: [2.0, 3.0, 40.0]})
    assert watched.deadline(0, slow) == (15.0 if trains else 30.0)
    quick = dataclasses.replace(reading, past={phase: [0.001]})
    assert watched.deadline(0, quick) == watch.LEAST


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_of_earlier_attempts_count_for_as_many_ranks(ranks: int, pair, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    watched, processes = pair
    watched.begin_attempt(2)
    enter(str(tmp_path), 0, processes[0].pid, TrainingPhase.STEP, waits=0)
    reading = watched.reading(0)
    assert reading is not None

    def begin_attempt_after(*past: float) -> None:
        """Begin an attempt of `ranks` after one in which rank 0 had calls of `past` seconds."""
        enter(str(tmp_path), 0, processes[0].pid, TrainingPhase.STEP, waits=0)
        monkeypatch.setattr(watch, "read", lambda _: dataclasses.replace(reading, past={TrainingPhase.STEP: list(past)}))
        watched.begin_attempt(ranks)

    slow = dataclasses.replace(reading, past={TrainingPhase.STEP: [20.0]})
    begin_attempt_after(2.0, 2.0, 2.0)
    assert watched.deadline(0, slow) == (10.0 if ranks == 2 else 100.0)
    assert watched.deadline(1, slow) == 100.0  # another rank
    begin_attempt_after(20.0)
    assert watched.deadline(0, slow) == (10.0 if ranks == 2 else 100.0)
    assert watched.deadline(0, dataclasses.replace(reading, past={TrainingPhase.STEP: [20.0] * KEPT})) == 100.0


def test_a_busy_process_has_longer(pair, tmp_path: Path) -> None:
    watched, _ = pair
    spinner = subprocess.Popen([sys.executable, "-c", SPINNER])
    try:
        enter(str(tmp_path), 0, spinner.pid, TrainingPhase.STEP, waits=0)
        assert verdicts(watched, [spinner], 1.5) == {}
    finally:
        spinner.kill()
        spinner.wait()


def test_a_rank_is_not_hung_while_a_process_that_it_started_works(pair, tmp_path: Path) -> None:
    """A rank sleeps while the workers of its loader read the first batch of an epoch."""
    watched, _ = pair
    parent = subprocess.Popen([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', "
                                                     f"'import os; print(os.getpid(), flush=True)\\n{SPINNER}'])"],
                              stdout=subprocess.PIPE)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    try:
        enter(str(tmp_path), 0, parent.pid, TrainingPhase.BETWEEN, waits=0)
        assert verdicts(watched, [parent], 1.5) == {}
        os.kill(worker, signal.SIGSTOP)
        assert verdicts(watched, [parent], 3.0) == {0: StallKind.HUNG}
    finally:
        os.kill(worker, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()


def test_a_rank_that_waits_for_one_process_after_another_works(pair, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """A script evaluates, or converts files, by commands that take a second each."""
    watched, _ = pair
    monkeypatch.setattr(watch, "LEAST", 1.0)  # ten times as long where it works: longer than this test looks
    use = "import time; end = time.process_time() + 1.2\nwhile time.process_time() < end: pass"
    parent = subprocess.Popen([sys.executable, "-c", "import subprocess, sys\nwhile True: "
                                                     f"subprocess.run([sys.executable, '-S', '-c', {use!r}])"],
                              start_new_session=True)
    try:
        enter(str(tmp_path), 0, parent.pid, TrainingPhase.BETWEEN, waits=0)
        assert verdicts(watched, [parent], 6.0) == {}
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()


FAMILY = """
import os, subprocess, sys, time
def use(): [None for _ in iter(lambda: time.process_time() < 0.4, False)]
for order in map(str.strip, sys.stdin):
    if order == "begin" and not os.fork():
        use()
        print(flush=True)
        time.sleep(1000)
    if order == "another" and not os.fork():
        if not os.fork():
            use()
            os._exit(0)
        os.wait()
        os._exit(0)
    if order != "begin":
        os.wait()
        print(flush=True)
"""


def test_the_time_of_a_child_counts_once_whether_it_lives_or_has_ended() -> None:
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                              start_new_session=True)
    assert parent.stdin is not None and parent.stdout is not None

    def after(order: str) -> float:
        """Return the seconds of the family after an order to the parent."""
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(f"{order}\n")
        parent.stdin.flush()
        parent.stdout.readline()
        return family.seconds()

    try:
        family = FamilyTime(parent.pid)
        assert family.seconds() == 0
        child = after("begin")
        assert child >= 0.35
        (living,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        os.kill(int(living), signal.SIGKILL)
        assert after("wait") - child < 0.1  # it has been counted
        assert after("another") - child >= 0.35  # two generations that began and ended between two looks
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()


def test_a_rank_is_not_hung_while_another_one_works(pair, tmp_path: Path) -> None:
    """Ranks in a barrier of the script's, which the page does not show, wait for one that evaluates."""
    watched, processes = pair
    spinner = subprocess.Popen([sys.executable, "-c", SPINNER])
    try:
        enter(str(tmp_path), 0, processes[0].pid, TrainingPhase.BETWEEN, waits=0)
        enter(str(tmp_path), 1, spinner.pid, TrainingPhase.EVALUATE, waits=0, calls=1)
        assert verdicts(watched, [processes[0], spinner], 1.5) == {}
        os.kill(spinner.pid, signal.SIGSTOP)  # now both are
        assert verdicts(watched, [processes[0], spinner]) == {0: StallKind.HUNG, 1: StallKind.STOPPED}
    finally:
        spinner.kill()
        spinner.wait()


def test_a_rank_that_waits_for_the_reader_of_its_output_is_not_hung(pair, tmp_path: Path) -> None:
    watched, processes = pair
    source, sink = os.pipe()
    try:
        assert not are_full((sink,))
        os.set_blocking(sink, False)
        with suppress(BlockingIOError):
            while True:
                os.write(sink, bytes(4096))
        assert are_full((sink,))
        enter(str(tmp_path), 0, processes[0].pid, TrainingPhase.BETWEEN, waits=0)
        assert verdicts(watched, processes[:1]) == {0: StallKind.HUNG}
        assert watched.poll({0: processes[0].pid}, held_up=are_full((sink,))) == []
    finally:
        os.close(source)
        os.close(sink)


def test_process_facts_come_from_proc() -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"herring \xff")  # any user's process may have such a name
    facts = process(os.getpid())
    name.write_bytes(before)
    assert facts is not None
    assert facts.state == "R"
    assert facts.cpu > 0
    ended = multiprocessing.get_context("fork").Process(target=int)
    ended.start()
    ended.join()
    assert process(ended.pid or 0) is None


def begin_without_room(memory: str) -> tuple[bool, list[str]]:
    """Initialise a rank whose agent's memory is full; return whether the agent sees it, and the log."""
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    os.environ.update({PAGES: memory, "LOCAL_RANK": "0"})
    os.posix_fallocate = os.ftruncate = refuse
    messages: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler())
    handler.emit = lambda record: messages.append(record.getMessage())
    shoal.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "optimizer": {"type": "Adam"}})
    return this_page.attached, messages


def test_a_rank_without_room_for_its_page_says_so_and_trains(tmp_path: Path) -> None:
    ((attached, messages),) = run_ranks(1, begin_without_room, str(tmp_path))
    assert not attached
    assert any(f"cannot see what this rank does, and notices no hang of it: {tmp_path} has no room" in text
               for text in messages)
