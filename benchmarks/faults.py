"""Chaos: a training is disturbed at random moments, by a seed; its weights must be those of an undisturbed one.

    .venv/bin/python benchmarks/faults.py --seed 1 --faults 12 --ranks 2 --stages 2 3-offload

Faults: `kill` (SIGKILL), `stop` (SIGSTOP), `hang` (a sleep without end), `raise` (an exception), `memory` (an allocation
beyond the limit), `disk` (no room for the next copy or checkpoint, by a limit), `full` (the file system of the
checkpoints is full until a rank has failed; needs root, to mount one), `spoil` (a wrong gradient, once), `flip` (a bit of
the newest copy in memory, then SIGKILL), `agent` (SIGKILL of the launcher, which is started again, as a scheduler would).
Each stage is a job of its own, which gets an equal part of the faults; a `-mesh` has 8 ranks.
Each job is shown while it runs (`chaos_view.py`), and its losses are drawn beside those of the undisturbed one.
Of each fault it takes the seconds until it was noticed (the rank is dead), until ranks train again (the first step of the
next attempt), and until the next new step (the first that had not been taken before). It counts hangs (no progress within
`--patience` seconds, which it ends itself) and orphans (processes of the job that are left at the end).
"""

from __future__ import annotations

import argparse
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
from machine import ROOT
from results import FOLDER, Outcome, Sheet, Target

from shoal.launch.doctor import jobs
from shoal.launch.job_record import JobRecord
from shoal.recording.page import Reading, read

FAULTS = ("kill", "stop", "hang", "raise", "memory", "disk", "full", "spoil", "flip", "agent")
SIGNALS = {"stop": signal.SIGSTOP, "hang": signal.SIGUSR2, "raise": signal.SIGUSR1, "memory": signal.SIGRTMIN,
           "disk": signal.SIGRTMIN + 1, "spoil": signal.SIGRTMIN + 2}
"""The signal of each fault; SIGKILL of the others."""
STAGES = ("0", "1", "2", "3", "2-offload", "3-offload", "1-mesh", "2-mesh")
"""What is disturbed: a stage of ZeRO, perhaps with the state on the host, or on a mesh of 2 x 2 x 2 ranks."""
ROOM = 32 << 20
"""Bytes of the file system of checkpoints."""
SCRIPT = ("steps", "stage", "every", "width", "layers", "pause")
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


class Job:
    """The training, and the launcher that runs it."""

    def __init__(self, options: argparse.Namespace, out: Path, restarts: int) -> None:
        self.out = out
        self.filler = out / "checkpoints" / "filler"
        """A file that takes the room of checkpoints."""
        self.name = f"chaos-{secrets.token_hex(4)}"
        self._command = [sys.executable, "-m", "shoal", "run", "--ranks", str(ranks_of(options)), "--grace", "2",
                         "--max-restarts", str(restarts), "--job", self.name, str(ROOT / "benchmarks" / "faulty.py"),
                         "--out", str(out), *(f"--{name}={getattr(options, name)}" for name in SCRIPT)]
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


def mount(folder: Path) -> str:
    """Mount a small file system at `folder`; return why that cannot be, empty where it is."""
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "shoal-chaos", str(folder)], capture_output=True,
                       text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(getattr(error, "stderr", "") or error).strip()
    return ""


def fill(filler: Path) -> None:
    """Write until the file system of `filler` is full."""
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


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


def disturb(job: Job, kind: str, chance: random.Random, options: argparse.Namespace, view: View) -> Recovery | None:
    """Wait for a random moment, commit a fault, and follow the recovery; None where the job ended or hung."""
    patience: float = options.patience
    wait = options.quiet * (1 + chance.random())
    begun: float | None = None
    deadline = time.monotonic() + patience + wait
    while True:
        found = job.look()
        view.update(found[2] if found is not None else ())
        if found is not None and all(page is not None and page.steps for page in found[2]):
            begun = time.monotonic() if begun is None else begun
            if time.monotonic() >= begun + wait and (kind != "flip" or list(found[0].glob("vault0/step*"))):
                break
        if job.process.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(0.005)
    folder, record, pages = found
    step = max(page.steps for page in pages if page is not None)
    start = time.monotonic()
    victim = inject(kind, job, folder, record, chance)
    noticed = started = joined = back = 0.0
    redone = 0
    while time.monotonic() - start < patience:
        if not noticed and gone(victim):
            noticed = time.monotonic() - start
            job.filler.unlink(missing_ok=True)
        if kind == "agent" and noticed and job.process.poll() is not None:
            job.start()
        found = job.look() if noticed else None
        view.update(found[2] if found is not None else ())
        if found is not None and found[1].pids != record.pids:
            started = started or time.monotonic() - start
            if all(page is not None for page in found[2]):
                joined = joined or time.monotonic() - start
                steps = least(found[2])
                if steps and not back:
                    back, redone = time.monotonic() - start, max(0, step - steps + 1)
                if steps > step:
                    return Recovery(kind=kind, step=step, noticed=noticed, started=started, joined=joined, back=back,
                                    new=time.monotonic() - start, redone=redone)
        time.sleep(0.005)
    return None


def undisturbed(options: argparse.Namespace, folder: Path) -> tuple[str, Losses]:
    """Return the digest and the losses of a training without faults."""
    out = folder / "undisturbed"
    out.mkdir()
    job = Job(options, out, restarts=0)
    job.process.wait()
    losses = Losses(out / "losses")
    losses.read()
    return (out / "digest").read_text(), losses


def main() -> int:
    """Run the chaos, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=2, help="they share batches of 4")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=["2"],
                        help="of ZeRO, perhaps with the state on the host; a -mesh has 8 ranks")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds that the script sleeps after each step")
    parser.add_argument("--quiet", type=float, default=10.0,
                        help="least seconds of training before a fault, at most twice as many: copies and spares need some")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds without progress that are a hang")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    kinds = [options.kinds[number % len(options.kinds)] for number in range(options.faults)]
    chance.shuffle(kinds)
    survivals: list[Survival] = []
    for number, stage in enumerate(options.stages):
        options.stage = stage
        survivals.append(survive(options, kinds[number::len(options.stages)], chance))
    return report(options, survivals)


def survive(options: argparse.Namespace, kinds: list[str], chance: random.Random) -> Survival:
    """Disturb one job by the faults `kinds`, and compare its weights with those of an undisturbed one."""
    options.steps = int((len(kinds) + 1) * 2.5 * options.quiet / (options.pause + 0.02))
    folder = Path(tempfile.mkdtemp(prefix="shoal-chaos-"))
    recoveries: list[Recovery] = []
    hangs = 0
    try:
        expected, losses = undisturbed(options, folder)
        out = folder / "disturbed"
        out.mkdir()
        if "full" in kinds and (reason := mount(out / "checkpoints")):
            print(f"full: skipped, because no file system can be mounted: {reason}", flush=True)
            kinds = [kind for kind in kinds if kind != "full"]
        job = Job(options, out, restarts=2 * len(kinds) + 5)
        with View(f"stage {options.stage}, {len(kinds)} faults", losses, Losses(out / "losses")) as view:
            for kind in kinds:
                recovery = disturb(job, kind, chance, options, view)
                if recovery is None:
                    hangs += job.process.poll() is None
                    print(f"{kind}: no recovery; the log is {(out / 'log').read_text()[-3000:]}", flush=True)
                    break
                recoveries.append(recovery)
                view.fault(f"stage {options.stage}: {len(recoveries):>3} {kind:<6} at step {recovery.step:>5}: noticed "
                           f"{recovery.noticed:5.2f} s, back {recovery.back:5.2f} s, new step {recovery.new:5.2f} s, "
                           f"{recovery.redone} steps again", recovery.step)
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
        orphans = job.orphans()
        same = (out / "digest").exists() and (out / "digest").read_text() == expected
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    finally:
        subprocess.run(["umount", "--lazy", str(folder / "disturbed" / "checkpoints")], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)
    return Survival(asked=len(kinds), recoveries=recoveries, hangs=hangs, orphans=len(orphans), same=same)


def report(options: argparse.Namespace, survivals: list[Survival]) -> int:
    """Print and keep the tables; return 0 where every promise that is no duration is kept."""
    recoveries = [each for survival in survivals for each in survival.recoveries]
    hangs, orphans = sum(each.hangs for each in survivals), sum(each.orphans for each in survivals)
    same = all(each.same for each in survivals)
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
    targets = [Target(what="faults survived", measured=len(recoveries), low=sum(each.asked for each in survivals),
                      high=options.faults),
               Target(what="hangs", measured=hangs, high=0), Target(what="orphans", measured=orphans, high=0),
               Target(what="weights are bitwise those of an undisturbed run (1: yes)", measured=float(same), low=1, high=1)]
    exact = list(targets)
    if kills := [each.new for each in recoveries if each.kind == "kill"]:
        targets.append(Target(what="SIGKILL to the next new step, median", measured=statistics.median(kills), high=3,
                              unit=" s"))
    if late := [each for each in recoveries if each.kind in ("stop", "hang")]:
        noticed, back = max(each.noticed for each in late), max(each.back for each in late)
        targets.append(Target(what="SIGSTOP or hang noticed, longest", measured=noticed, high=6, unit=" s"))
        targets.append(Target(what="SIGSTOP or hang, ranks train again, longest", measured=back, high=10, unit=" s"))
    note = (f"{options.ranks} ranks (8 of a mesh), stages {', '.join(options.stages)}, a copy every {options.every} steps, "
            f"width {options.width}, {options.layers} layers; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors "
            f"at the end")
    Outcome(benchmark="faults", command=" ".join(["python", *sys.argv]), note=note, sheets=(sheet,), targets=tuple(targets),
            raw={"options": vars(options), "recoveries": [asdict(each) for each in recoveries]}).publish(None)
    return 0 if all(target.met for target in exact) else 1


if __name__ == "__main__":
    sys.exit(main())
