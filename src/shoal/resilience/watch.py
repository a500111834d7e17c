"""The agent watches its ranks: it reads their pages and /proc, and finds those that are stopped or hung.

A call is late after 5 times the median of its phase where it trains, 10 times where it evaluates, saves, loads, reads data
or runs the script's own code, and at least 5 s. Calls of earlier attempts of as many ranks count for the median: the first
steps of an attempt are slow, and a hang among them should be noticed as soon. The first call of a phase may compile: it is
late after 10 times the longest first call of an earlier attempt, and at least a minute; if there was none, after `UNKNOWN`.

    stopped    the kernel has suspended the process (state T in /proc), by SIGSTOP or a terminal
    hung       a call is late, the rank is in no collective of Shoal, and no such rank of this node uses a processor, nor
               does a process that it started, as the workers of a loader; or the call is later still
    waiting    a call is late because another rank is; where all ranks of the job that run wait, all are hung

So ranks that wait in a barrier of the script for one that evaluates are not hung. While a debugger has stopped a rank
(state t) none is. When a rank is ended at a deadline, the deadline doubles, so that a slow call cannot end every attempt.
Once the job has passed that step, and no call of the phase missed the original deadline, that deadline holds again: the rank
had hung.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import median

from shoal.recording.page import KEPT, Reading, TrainingPhase, read
from shoal.resilience.processes import FamilyTime, Process, process

__all__ = ["StallKind", "Suspicion", "Watch"]

TRAINING_FACTOR = 5.0
"""A call that trains is late after so many times the median duration of its phase: such calls last alike."""
FACTOR = 10.0
"""Any other call, which may wait for files or serve a longer data set, is late after so many times the median."""
TRAINING = (TrainingPhase.FORWARD, TrainingPhase.BACKWARD, TrainingPhase.STEP)
"""The phases of calls that train, and read no data: `train_batch` of a pipeline does."""
LEAST = 5.0
"""Seconds after which a call may be late."""
FIRST_LEAST = 60.0
"""Seconds after which the first call of a phase may be late."""
UNKNOWN = 600.0
"""Deadline, in seconds, of a call whose phase has no history."""
STOPPED_AFTER = 4.0
"""Seconds for which a process is seen stopped before it counts as stopped; a debugger's stop (state t) never does."""
BUSY_FACTOR = 10.0
"""While a rank uses the processor, a call is late after so many times its deadline."""
BUSY = 0.05
"""The share of one processor above which a process uses it."""
PAUSE = 3.0
"""Seconds between two looks after which the watch itself was stopped, as by a suspended machine."""


class StallKind(Enum):
    """The reason to end a rank."""

    STOPPED = "stopped"
    HUNG = "hung"


class _Meter:
    """Tells once a second whether something uses a processor, by its processor time."""

    def __init__(self) -> None:
        self._cpu: float | None = None
        self._since = 0.0
        self.idle = False
        """Whether it has used no processor to speak of for about a second."""

    def look(self, cpu: Callable[[], float], now: float) -> bool:
        """Return `idle`, after a look at the seconds `cpu` if the last was a second ago."""
        if self._cpu is None or now - self._since >= 1.0:
            before, self._cpu = self._cpu, cpu()
            self.idle = before is not None and self._cpu - before < BUSY * (now - self._since)
            self._since = now
        return self.idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """A rank that is stopped or hung."""

    local_rank: int
    pid: int
    kind: StallKind
    reading: Reading | None
    seconds: float
    """For how long the call has lasted, or the process was seen stopped."""
    deadline: float

    def __str__(self) -> str:
        where = "before initialize, or with no room in /dev/shm for its page" if self.reading is None else (
            f"in {self.reading.phase.name.lower().replace('_', ' ')} after {self.reading.steps} "
            f"step{'' if self.reading.steps == 1 else 's'}")
        if self.kind is StallKind.STOPPED:
            return f"stopped (state T, as by SIGSTOP) for {self.seconds:.1f} s, {where}"
        return f"hung {where}: the call has lasted {self.seconds:.1f} s, its deadline is {self.deadline:.1f} s"


class Watch:
    """The watch over the ranks of one node. It outlives attempts, so that their durations count for the next one."""

    def __init__(self, folder: str, *, whole_job: bool) -> None:
        """`folder` holds the pages; `whole_job` says that no other node has ranks, so that a wait for all is a hang."""
        self.folder = folder
        self._whole_job = whole_job
        self._ranks = 0
        self.threads: dict[int, int] = {}
        """Compute threads, by local rank, in the last attempt of as many ranks that came so far."""
        self._firsts: dict[TrainingPhase, float] = {}
        self._earlier: dict[int, dict[TrainingPhase, list[float]]] = {}
        """Seconds of the last calls of earlier attempts, by local rank."""
        self._grace: defaultdict[TrainingPhase, float] = defaultdict(lambda: 1.0)
        self._ended_at: dict[TrainingPhase, int] = {}
        """The steps that any rank had taken when one was last ended in a phase; none where a later call was slow."""
        self.begin_attempt(0)

    def begin_attempt(self, ranks: int) -> None:
        """Forget the processes of the last attempt, and what its calls took unless the job has as many ranks again."""
        self._earlier = self._durations() if ranks == self._ranks else {}
        self.threads = self._threads() if ranks == self._ranks else {}
        self._ranks = ranks
        for name in os.listdir(self.folder):
            if name.startswith("rank"):
                os.unlink(os.path.join(self.folder, name))
        self._looked = self._resumed = time.monotonic()
        self._stopped_since: dict[int, float] = {}
        self._meters: defaultdict[int, _Meter] = defaultdict(_Meter)
        self._child_meters: defaultdict[int, _Meter] = defaultdict(_Meter)
        self._families: dict[int, FamilyTime] = {}
        self._calls: dict[int, tuple[int, TrainingPhase, bool, float]] = {}
        self._steps = 0
        self._ended = set[int]()

    def _durations(self) -> dict[int, dict[TrainingPhase, list[float]]]:
        """Return what the last calls took, of this attempt and the earlier ones."""
        return self._earlier | {local_rank: {phase: self._past(local_rank, reading, phase) for phase in TrainingPhase}
                                for local_rank, reading in self._readings().items()}

    def _threads(self) -> dict[int, int]:
        """Return the compute threads of the attempt that ends; of an earlier one where a rank has not told them."""
        return self.threads | {local_rank: reading.threads for local_rank, reading in self._readings().items()
                               if reading.threads}

    def _readings(self) -> dict[int, Reading]:
        """Return the pages of the attempt by local rank."""
        readings = {int(name.removeprefix("rank")): read(os.path.join(self.folder, name))
                    for name in os.listdir(self.folder) if name.startswith("rank")}
        return {local_rank: reading for local_rank, reading in readings.items() if reading is not None}

    def _past(self, local_rank: int, reading: Reading, phase: TrainingPhase) -> list[float]:
        """Return the seconds of the last calls of a phase."""
        past = reading.past.get(phase, [])
        return past + self._earlier.get(local_rank, {}).get(phase, [])[:KEPT - len(past)]

    def reading(self, local_rank: int) -> Reading | None:
        """Return the page of a rank."""
        return read(os.path.join(self.folder, f"rank{local_rank}"))

    def poll(self, pids: Mapping[int, int], *, held_up: bool = False) -> list[Suspicion]:
        """Return the ranks that are stopped or hung now; `pids` are the processes by local rank.

        Where something outside of the job holds its ranks up, or a debugger has stopped one, the calls of now have their
        whole deadlines after that; and after the end of a rank, which the others may notice by themselves.
        """
        now, running = time.monotonic(), {local_rank: process(pid) for local_rank, pid in pids.items()}
        traced = any(facts is not None and facts.state == "t" for facts in running.values())
        ended = {local_rank for local_rank, facts in running.items() if facts is None or facts.state == "Z"}
        if held_up or traced or ended - self._ended or (
                now - self._looked > PAUSE):  # this process was stopped, and the ranks perhaps with it
            self._resumed = now
        self._ended = ended
        self._looked = now
        found: list[Suspicion] = []
        waiting: list[Suspicion] = []
        late: list[Suspicion] = []
        working = False
        for local_rank, pid in pids.items():
            facts, reading = running[local_rank], self.reading(local_rank)
            if facts is None or local_rank in ended:
                continue
            if reading is not None and reading.pid != pid:
                reading = None  # a launcher between the agent and the program, or a page not attached yet
            if reading is not None:
                self._learn(local_rank, reading)
            if (stopped := self._stopped(local_rank, facts, now)) is not None:
                if stopped >= STOPPED_AFTER:
                    found.append(Suspicion(local_rank=local_rank, pid=pid, kind=StallKind.STOPPED, reading=reading,
                                           seconds=stopped, deadline=STOPPED_AFTER))
                continue
            waits = reading is not None and bool(reading.waits)
            working |= not waits and not self._is_idle(local_rank, pid, facts, now)
            if (suspicion := self._late(local_rank, pid, reading, now)) is not None:
                (waiting if waits else late).append(suspicion)
        found += [each for each in late if not working or each.seconds > BUSY_FACTOR * each.deadline]
        if not found and self._whole_job and len(waiting) == len(pids) - len(ended):  # these come to no collective
            return waiting
        return found

    def double(self, suspicion: Suspicion) -> None:
        """Double the deadlines of the phase in which a rank is ended."""
        if suspicion.kind is StallKind.HUNG and suspicion.reading is not None:
            self._grace[suspicion.reading.phase] *= 2
            self._ended_at[suspicion.reading.phase] = self._steps

    def deadline(self, local_rank: int, reading: Reading) -> float:
        """Return the seconds after which the present call of a rank is late."""
        phase = reading.phase
        if reading.first:
            seconds = max(FIRST_LEAST, FACTOR * self._firsts[phase]) if phase in self._firsts else UNKNOWN
        elif phase in reading.past:
            middle = median(self._past(local_rank, reading, phase))
            seconds = max(LEAST, (TRAINING_FACTOR if phase in TRAINING else FACTOR) * middle)
        else:  # the second of its kind
            seconds = max(FIRST_LEAST, FACTOR * self._firsts.get(phase, 0.0))
        return seconds * self._grace[phase]

    def _late(self, local_rank: int, pid: int, reading: Reading | None, now: float) -> Suspicion | None:
        if reading is None or reading.phase is TrainingPhase.END:  # what is no training has no deadline
            return None
        seconds, deadline = now - max(reading.since, self._resumed), self.deadline(local_rank, reading)
        if seconds > deadline / self._grace[reading.phase]:
            self._ended_at.pop(reading.phase, None)  # it is slow, unless it hangs too
        if seconds <= deadline:
            return None
        return Suspicion(local_rank=local_rank, pid=pid, kind=StallKind.HUNG, reading=reading, seconds=seconds,
                         deadline=deadline)

    def _learn(self, local_rank: int, reading: Reading) -> None:
        """Note how long the first call of a phase took, once the next one has begun."""
        before = self._calls.get(local_rank)
        if before is not None and before[0] != reading.calls and before[2]:
            self._firsts[before[1]] = max(self._firsts.get(before[1], 0.0), reading.since - before[3])
        self._calls[local_rank] = (reading.calls, reading.phase, reading.first, reading.since)
        self._steps = max(self._steps, reading.steps)
        for phase in [phase for phase, step in self._ended_at.items() if reading.steps > step]:
            del self._ended_at[phase], self._grace[phase]

    def _stopped(self, local_rank: int, facts: Process, now: float) -> float | None:
        """Return for how long the process has been seen stopped, None where it is not."""
        if facts.state != "T":
            self._stopped_since.pop(local_rank, None)
            return None
        return now - self._stopped_since.setdefault(local_rank, now)

    def _is_idle(self, local_rank: int, pid: int, facts: Process, now: float) -> bool:
        """Whether neither the process nor one that it started has used a processor for about a second."""
        family = self._families.setdefault(pid, FamilyTime(pid))
        return (self._meters[local_rank].look(lambda: facts.cpu, now)
                and self._child_meters[local_rank].look(family.seconds, now))
