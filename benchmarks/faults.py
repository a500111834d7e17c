"""Chaos: a training is disturbed at random moments, by a seed; its losses and weights must be those of an undisturbed one.

    .venv/bin/python benchmarks/faults.py --seed 1 --faults 12 --ranks 2 --stages 2 3-offload
    .venv/bin/python benchmarks/faults.py --model 30m --ranks 4 --faults 3 --quiet 3 --every 3    # 5 minutes, 2 busy cores

Faults: `kill` (SIGKILL), `stop` (SIGSTOP), `hang` (a sleep without end), `spin` (a loop without end, which uses the
processor: its deadline is ten times as long), `raise` (an exception), `memory` (an allocation beyond the limit), `disk`
(no room for the next copy or checkpoint, by a limit), `full` (the file system of the checkpoints is full until a rank has
failed; needs root, to mount one), `spoil` (a wrong gradient, once, when the guard has the steps that it compares with),
`flip` (a bit of the newest copy in memory, then SIGKILL), `agent` (SIGKILL of the launcher, which is started again, as a
scheduler would).
Those of hosts and of links are in node_loss.py. Each stage is a job of its own, which gets an equal part of the faults; a
`-mesh` has 8 ranks. Each job is shown while it runs (`chaos_view.py`), and its losses are drawn beside the undisturbed ones.
Of each fault it takes the seconds until it was noticed (the rank is dead), until ranks train again (the first step of the
next attempt), and until the next new step (the first that had not been taken before). It counts hangs (no progress within
`--patience` seconds, which it ends itself), orphans (processes of the job that are left at the end), the steps taken again,
and restarts that read the disk though a newer copy was in memory. The loss of each step, each time it was taken, must be
bitwise that of the undisturbed training.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos_view import Losses, View
from interrupts import leaving
from machine import ROOT
from results import FOLDER, Outcome, Sheet, Target

from shoal.launch.doctor import jobs
from shoal.launch.job_record import JobRecord
from shoal.recording.page import Reading, read
from shoal.resilience.guard import LEAST as LEAST_HISTORY
from shoal.resilience.watch import BUSY_FACTOR, LEAST

FAULTS = ("kill", "stop", "hang", "raise", "memory", "disk", "full", "spoil", "flip", "agent", "spin")
SIGNALS = {"stop": signal.SIGSTOP, "hang": signal.SIGUSR2, "raise": signal.SIGUSR1, "memory": signal.SIGRTMIN,
           "disk": signal.SIGRTMIN + 1, "spoil": signal.SIGRTMIN + 2, "spin": signal.SIGRTMIN + 3}
"""The signal of each fault; SIGKILL of the others."""
STAGES = ("0", "1", "2", "3", "2-offload", "3-offload", "1-mesh", "2-mesh")
"""What is disturbed: a stage of ZeRO, perhaps with the state on the host, or on a mesh of 2 x 2 x 2 ranks."""
SECONDS = {"small": 0.02, "30m": 1.2}
"""About the seconds of a step of each model, without the pause after it."""
ROOM = {"small": 32 << 20, "30m": 2 << 30}
"""Bytes of the file system of checkpoints, by model."""
WITHOUT_COPIES = ("agent", "disk")
"""Faults after which the newest copy may be older: copies end with their launcher, and fail without room for files."""
LATE = BUSY_FACTOR * LEAST + 1.0
"""Seconds within which a rank that hangs and uses the processor is noticed, if a tenth of that is the least of its call."""
CHECKPOINT = 5
"""Copies in memory between two checkpoints."""
SCRIPT = ("steps", "stage", "model", "every", "width", "layers")
"""Options that the training gets."""
TOKEN = "SHOAL_CHAOS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One fault and what followed; seconds since the fault."""

    kind: str
    step: int
    """Steps that had been taken."""
    noticed: float
    """The process has ended."""
    started: float
    """The processes of the next attempt have begun."""
    joined: float
    """They have begun to build their engines."""
    back: float
    new: float
    redone: int
    """Steps that were taken twice."""
    alive: int
    """Steps of the newest intact copy in memory at the fault, -1 without one."""
    loaded: int
    """Steps of the state from which the next attempt went on."""
    source: str
    """Where that was: memory, disk or nothing."""
    committing: int
    """The most steps that a copy took until it could be loaded, or one that was under way had taken at the fault."""

    @property
    def goes_too_far_back(self) -> bool:
        """Whether the next attempt went on from an older state than the newest copy, with copies that the fault left."""
        return self.kind != "agent" and self.alive > self.loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """What came of one job."""

    asked: int
    """Faults that were to be committed."""
    recoveries: list[Recovery]
    hangs: int
    orphans: int
    same: bool
    """Its weights are bitwise those of an undisturbed job."""
    unlike: int
    """Steps whose loss was not, at any time that they were taken."""
    noted: int
    """Steps whose loss is known: a rank may end between a step and its note."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is true of a job when a fault is committed."""

    folder: Path
    """The memory of its launcher."""
    record: JobRecord
    step: int
    """Steps that some rank has taken."""
    copy: int
    """Steps of the newest copy in memory, -1 without one."""
    committing: int
    """See `Recovery.committing`."""


class Job:
    """The training, and the launcher that runs it."""

    def __init__(self, options: argparse.Namespace, out: Path, restarts: int, pause: float) -> None:
        self.out = out
        self.filler = out / "checkpoints" / "filler"
        """A file that takes the room of checkpoints."""
        self.name = f"chaos-{secrets.token_hex(4)}"
        self._command = [sys.executable, "-m", "shoal", "run", "--ranks", str(ranks_of(options)), "--grace", "2",
                         "--max-restarts", str(restarts), "--job", self.name, str(ROOT / "benchmarks" / "faulty.py"),
                         "--out", str(out), f"--pause={pause}", f"--save={CHECKPOINT * options.every}",
                         *(f"--{name}={getattr(options, name)}" for name in SCRIPT)]
        self.start()

    def start(self) -> None:
        """Start the launcher."""
        self._log = (self.out / "log").open("a")
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log, start_new_session=True,
                                        env={**os.environ, TOKEN: self.name, "OMP_NUM_THREADS": "1"})

    def look(self) -> tuple[Path, JobRecord, list[Reading | None]] | None:
        """Return the folder, the record and the pages of the attempt that runs, None where none does."""
        for folder, record in jobs().items():
            if record.job == self.name and record.agent == self.process.pid:
                pages = [read(str(folder / f"rank{local_rank}")) for local_rank in range(len(record.pids))]
                own = [page if page is not None and page.pid == pid else None
                       for page, pid in zip(pages, record.pids, strict=True)]
                return folder, record, own
        return None

    def load_after(self, moment: float) -> tuple[int, str]:
        """Return from which steps, and from where, an attempt went on that began after `moment`."""
        lines = (self.out / "loads").read_text().splitlines() if (self.out / "loads").exists() else []
        found = [(int(steps), source) for at, steps, source in map(str.split, lines) if float(at) > moment]
        return found[0] if found else (0, "nothing")

    def end(self) -> int:
        """Kill all processes of the job that run, and return how many there were."""
        orphans = self.orphans()
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return len(orphans)

    def orphans(self) -> list[int]:
        """Return the processes of the job that run."""
        word = f"{TOKEN}={self.name}".encode()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    if word in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found


def ranks_of(options: argparse.Namespace) -> int:
    """Return the ranks of a job."""
    return 8 if options.stage.endswith("-mesh") else options.ranks


def mount(folder: Path, room: int) -> str:
    """Mount a small file system at `folder`; return why that cannot be, empty where it is."""
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "shoal-chaos", str(folder)], capture_output=True,
                       text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(getattr(error, "stderr", "") or error).strip()
    return ""


def fill(filler: Path) -> None:
    """Write until the file system of `filler` is full."""
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def newest_copy(folder: Path) -> int:
    """Return the steps of the newest copy in memory that can be loaded, -1 without one."""
    vault = folder / "vault0"
    try:
        return max((int(name.removeprefix("step")) for name in os.listdir(vault) if name.startswith("step")), default=-1)
    except OSError:
        return -1


def most(pages: list[Reading | None]) -> int:
    """Return the steps that any rank has taken."""
    return max((page.steps for page in pages if page is not None), default=0)


def least(pages: list[Reading | None]) -> int:
    """Return the steps that every rank has taken."""
    return min((0 if page is None else page.steps for page in pages), default=0)


def gone(pid: int) -> bool:
    """Whether the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def inject(kind: str, job: Job, folder: Path, record: JobRecord, chance: random.Random) -> int:
    """Commit a fault; return the process that it ends."""
    pid = record.agent if kind == "agent" else chance.choice(record.pids)
    if kind == "flip":
        files = [path for tag in folder.glob("vault0/step*") for path in tag.glob("*.safetensors")]
        newest = max(files, key=lambda path: (int(path.parent.name.removeprefix("step")), path.stat().st_size))
        data = bytearray(newest.read_bytes())
        data[chance.randrange(len(data) // 2, len(data))] ^= 1 << chance.randrange(8)
        newest.write_bytes(data)
    if kind == "full":
        fill(job.filler)
    else:
        os.kill(pid, SIGNALS.get(kind, signal.SIGKILL))
    return pid


def wait_for_moment(job: Job, kind: str, wait: float, options: argparse.Namespace, view: View) -> Moment | None:
    """Wait until the ranks have trained for `wait` seconds; None where the job ended or hung."""
    begun: float | None = None
    every: int = options.every
    deadline = time.monotonic() + options.patience + wait
    newest, committing = None, 0
    while True:
        found = job.look()
        view.update(found[2] if found is not None else ())
        if found is not None and all(page is not None and page.steps for page in found[2]):
            begun = time.monotonic() if begun is None else begun
            copy = newest_copy(found[0])
            if newest is not None and copy > newest:
                committing = max(committing, most(found[2]) - copy)
            newest = copy
            judges = kind != "spoil" or least(found[2]) > LEAST_HISTORY
            if time.monotonic() >= begun + wait and judges and (kind != "flip" or copy >= 0):
                return Moment(folder=found[0], record=found[1], step=most(found[2]), copy=copy,
                              committing=max(committing, most(found[2]) - copy - every if copy >= 0 else 0))
        if job.process.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def disturb(job: Job, kind: str, chance: random.Random, options: argparse.Namespace, view: View) -> Recovery | None:
    """Wait for a random moment, commit a fault, and follow the recovery; None where the job ended or hung."""
    moment = wait_for_moment(job, kind, options.quiet * (1 + chance.random()), options, view)
    if moment is None:
        return None
    step, record = moment.step, moment.record
    start = time.monotonic()
    victim = inject(kind, job, moment.folder, record, chance)
    noticed = started = joined = back = 0.0
    while time.monotonic() - start < options.patience:
        if not noticed and gone(victim):
            noticed = time.monotonic() - start
            job.filler.unlink(missing_ok=True)
        if kind == "agent" and noticed and job.process.poll() is not None:
            job.start()
        found = job.look()
        view.update(found[2] if found is not None else ())
        if found is not None and found[1].pids == record.pids:
            step = max(step, most(found[2]))  # ranks that the fault does not stop take further steps
        elif found is not None and noticed:
            started = started or time.monotonic() - start
            if all(page is not None for page in found[2]):
                joined = joined or time.monotonic() - start
                steps = least(found[2])
                if steps and not back:
                    back = time.monotonic() - start
                if steps > step:
                    loaded, source = job.load_after(start)
                    alive = moment.copy - (options.every if kind == "flip" else 0)
                    return Recovery(kind=kind, step=step, noticed=noticed, started=started, joined=joined, back=back,
                                    new=time.monotonic() - start, redone=step - loaded, alive=alive, loaded=loaded,
                                    source=source, committing=moment.committing)
        time.sleep(0.005)
    return None


def undisturbed(options: argparse.Namespace, folder: Path) -> tuple[str, Losses]:
    """Return the digest and the losses of a training without faults and pauses."""
    out = folder / "undisturbed"
    out.mkdir()
    job = Job(options, out, restarts=0, pause=0.0)
    try:
        job.process.wait()
    finally:
        job.end()
    losses = Losses(out / "losses", pause=options.pause)
    losses.read()
    return (out / "digest").read_text(), losses


def main() -> int:
    """Run the chaos, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2, help="they share batches of 4 (8 of --model 30m)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=["2"],
                        help="of ZeRO, perhaps with the state on the host; a -mesh has 8 ranks")
    parser.add_argument("--model", choices=tuple(SECONDS), default="small",
                        help="of --width and --layers, or the GPT of 30 M on batches of 8 x 128 tokens; no -mesh has that")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds that the script sleeps after each step")
    parser.add_argument("--quiet", type=float, default=10.0,
                        help="least seconds of training before a fault, at most twice as many: copies and spares need some")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds without progress that are a hang")
    options = parser.parse_args()
    if options.model != "small" and any(stage.endswith("-mesh") for stage in options.stages):
        parser.error(f"--model {options.model}: no -mesh trains it; leave out the stages that end in -mesh")
    chance = random.Random(options.seed)
    kinds = [options.kinds[number % len(options.kinds)] for number in range(options.faults)]
    chance.shuffle(kinds)
    survivals: list[Survival] = []
    with leaving():
        for number, stage in enumerate(options.stages):
            options.stage = stage
            survivals.append(survive(options, kinds[number::len(options.stages)], chance))
    return report(options, survivals)


def survive(options: argparse.Namespace, kinds: list[str], chance: random.Random) -> Survival:
    """Disturb one job by the faults `kinds`, and compare its weights with those of an undisturbed one."""
    until_saved = CHECKPOINT * options.every * sum(kind in ("disk", "full") for kind in kinds)
    options.steps = LEAST_HISTORY + until_saved + int(
        (len(kinds) + 1) * 2.5 * options.quiet / (options.pause + SECONDS[options.model]))
    folder = Path(tempfile.mkdtemp(prefix="shoal-chaos-"))
    recoveries: list[Recovery] = []
    hangs = 0
    job: Job | None = None
    try:
        expected, losses = undisturbed(options, folder)
        out = folder / "disturbed"
        out.mkdir()
        if "full" in kinds and (reason := mount(out / "checkpoints", ROOM[options.model])):
            print(f"full: skipped, because no file system can be mounted: {reason}", flush=True)
            kinds = [kind for kind in kinds if kind != "full"]
        job = Job(options, out, restarts=2 * len(kinds) + 5, pause=options.pause)
        found_losses = Losses(out / "losses")
        with View(f"stage {options.stage}, {len(kinds)} faults", losses, found_losses) as view:
            for kind in kinds:
                recovery = disturb(job, kind, chance, options, view)
                if recovery is None:
                    hangs += job.process.poll() is None
                    print(f"{kind}: no recovery; the log is {(out / 'log').read_text()[-3000:]}", flush=True)
                    break
                recoveries.append(recovery)
                view.fault(f"stage {options.stage}: {len(recoveries):>3} {kind:<6} at step {recovery.step:>5}: noticed "
                           f"{recovery.noticed:5.2f} s, back {recovery.back:5.2f} s, new step {recovery.new:5.2f} s, "
                           f"{recovery.redone} steps again, from {recovery.source}", recovery.step)
            deadline = time.monotonic() + options.patience * 5
            while job.process.poll() is None and time.monotonic() < deadline:
                found = job.look()
                view.update(found[2] if found is not None else ())
                time.sleep(0.05)
        view.picture(FOLDER / f"chaos-{options.stage}.svg")
        print(f"stage {options.stage}: goodput {view.goodput:.0%}; its losses are drawn in "
              f"{FOLDER}/chaos-{options.stage}.svg", flush=True)
        hangs += job.process.poll() is None
        time.sleep(1.0)
        orphans = job.end()
        same = (out / "digest").exists() and (out / "digest").read_text() == expected
        unlike = found_losses.unlike(losses)
        if unlike:
            print(f"stage {options.stage}: the losses of steps {unlike[:20]} are not those of the undisturbed training",
                  flush=True)
    finally:
        if job is not None:
            job.end()
        subprocess.run(["umount", "--lazy", str(folder / "disturbed" / "checkpoints")], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)
    return Survival(asked=len(kinds), recoveries=recoveries, hangs=hangs, orphans=orphans, same=same,
                    unlike=len(unlike), noted=len(found_losses.values), steps=options.steps)


def described(options: argparse.Namespace) -> str:
    """Return the model in words."""
    if options.model == "small":
        return f"width {options.width}, {options.layers} layers"
    return f"the GPT of {options.model} on batches of 8 x 128 tokens"


def exact_targets(options: argparse.Namespace, survivals: list[Survival], recoveries: list[Recovery]) -> list[Target]:
    """Return the promises that are no durations."""
    copied = [each for each in recoveries if each.kind not in WITHOUT_COPIES]
    found = [
        Target(what="faults survived", measured=len(recoveries), low=sum(each.asked for each in survivals),
               high=options.faults),
        Target(what="hangs", measured=sum(each.hangs for each in survivals), high=0),
        Target(what="orphans", measured=sum(each.orphans for each in survivals), high=0),
        Target(what="weights are bitwise those of an undisturbed run (1: yes)", low=1, high=1,
               measured=float(all(each.same for each in survivals))),
        Target(what=f"losses that are not, of {sum(each.noted for each in survivals)} steps", high=0,
               measured=sum(each.unlike for each in survivals)),
        Target(what="steps whose loss is not known, at most one a fault", high=len(recoveries),
               measured=sum(each.steps - each.noted for each in survivals)),
        Target(what="restarts that read the disk though a newer copy was in memory", high=0,
               measured=sum(each.goes_too_far_back and each.source == "disk" for each in recoveries)),
        Target(what="restarts from an older state than the newest intact copy", high=0,
               measured=sum(each.goes_too_far_back for each in recoveries))]
    if copied:
        found.append(Target(what=f"steps again without damage to copies, less than 2 x {options.every}", unit="",
                            high=2 * options.every - 1,
                            measured=max((each.redone for each in copied if each.kind != "flip"), default=0)))
    return found


def times(options: argparse.Namespace, recoveries: list[Recovery]) -> list[Target]:
    """Return the promises about durations, and about the steps that a copy may take."""
    targets: list[Target] = []
    if copied := [each for each in recoveries if each.kind not in WITHOUT_COPIES]:
        committing = max(each.committing for each in recoveries)
        targets.append(Target(
            what=f"steps again beyond {options.every} ({2 * options.every} with a damaged copy): those that a copy takes",
            measured=max(each.redone - options.every * (2 if each.kind == "flip" else 1) for each in copied),
            high=committing))
    if kills := sorted(each.new for each in recoveries if each.kind == "kill"):
        targets.append(Target(what=f"SIGKILL to the next new step, median of {len(kills)}", high=3, unit=" s",
                              measured=statistics.median(kills)))
        targets.append(Target(what=f"SIGKILL to the next new step, 95th percentile of {len(kills)}", high=5, unit=" s",
                              measured=kills[math.ceil(0.95 * len(kills)) - 1]))
    if late := [each for each in recoveries if each.kind in ("stop", "hang")]:
        targets.append(Target(what="SIGSTOP or an idle hang noticed, longest", high=6, unit=" s",
                              measured=max(each.noticed for each in late)))
        targets.append(Target(what="SIGSTOP or an idle hang, ranks train again, longest", high=10, unit=" s",
                              measured=max(each.back for each in late)))
    if spins := [each for each in recoveries if each.kind == "spin"]:
        targets.append(Target(what="a hang that uses the processor noticed, longest", high=LATE, unit=" s",
                              measured=max(each.noticed for each in spins)))
    return targets


def report(options: argparse.Namespace, survivals: list[Survival]) -> int:
    """Print and keep the tables; return 0 where every promise that is no duration is kept."""
    recoveries = [each for survival in survivals for each in survival.recoveries]
    rows: list[tuple[str, ...]] = []
    for kind in FAULTS:
        some = [each for each in recoveries if each.kind == kind]
        if some:
            rows.append((kind, str(len(some)), *(f"{statistics.median(values):.2f} / {max(values):.2f}" for values in (
                [each.noticed for each in some], [each.started for each in some], [each.joined for each in some],
                [each.back for each in some], [each.new for each in some])),
                str(max(each.redone for each in some))))
    sheet = Sheet(title="Recovery, seconds after the fault (median / longest)",
                  columns=("fault", "count", "noticed", "processes", "join", "train", "new step", "steps again, most"),
                  rows=tuple(rows))
    exact = exact_targets(options, survivals, recoveries)
    targets = [*exact, *times(options, recoveries)]
    note = (f"{options.ranks} ranks (8 of a mesh), stages {', '.join(options.stages)}, a copy every {options.every} steps, "
            f"{described(options)}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors "
            f"at the end")
    Outcome(benchmark="faults", command=" ".join(["python", *sys.argv]), note=note, sheets=(sheet,), targets=tuple(targets),
            raw={"options": vars(options), "recoveries": [asdict(each) for each in recoveries]}).publish(None)
    return 0 if all(target.met for target in exact) else 1


if __name__ == "__main__":
    sys.exit(main())
