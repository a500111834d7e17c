"""Seconds from the loss of one of three nodes until the other two train again, and what of the training is lost with it.

    python benchmarks/node_loss.py [--rounds 3]              # nodes that are processes of this machine
    python benchmarks/node_loss.py --machines [--rounds 1]   # hosts of network namespaces; root, iproute2, openssh-server

Each node has one rank at stage 3 and a copy every step. On this machine, `killed` is SIGKILL to an agent, whose guardian
removes its part of the copies, and `frozen` SIGSTOP to all processes of a node, as where its link is down. Nodes that are
started by hand lose the last, for the first has the rendezvous; hosts of one launcher lose the first.

Machines lose a link (`link`: it is set down, and no connection ends), the first host, which serves the store (`store`), and
the one of the launcher (`launcher`): in both its link goes down and all its processes end, as where it loses power. The
other hosts end a job without its launcher, and it is started again on one of them, from the checkpoint on the shared disk.

The losses of all steps are compared with those of three nodes that lose nothing: bitwise until the loss, within rounding
after it. Each sample must be used once, and no host may keep a process of the job.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from machines import Machines
from namespaces import HostsUnavailable
from results import Outcome, Sheet, Target

TRAIN = """
import os, sys, time, torch, shoal

folder, last, save = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = {"train_batch_size": 6, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3},
          "resilience": {"vault": {"every": 1}}}
torch.manual_seed(0)
rows = [(index, torch.randn(64, generator=torch.Generator().manual_seed(index))) for index in range(6000)]
engine, _, loader, _ = shoal.initialize(model=torch.nn.Linear(64, 64), config=config, training_data=rows)
engine.load_checkpoint(f"{folder}/checkpoints")
notes = os.open(f"{folder}/notes", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
batches = iter(loader)
while engine.global_steps < last:
    numbers, row = next(batches)
    loss = (engine(row) - row.flip(1)).square().mean()
    engine.backward(loss)
    words = engine.global_steps + 1, engine.world_size, engine.global_rank, float(loss), *numbers.tolist()
    os.write(notes, " ".join(map(str, ("takes", *words))).encode() + b"\\n")
    engine.step()
    if engine.global_rank == 0:
        words = engine.global_steps, engine.world_size, time.monotonic(), os.getppid()
        os.write(notes, " ".join(map(str, ("has", *words))).encode() + b"\\n")
    time.sleep(0.1)
    if save and engine.global_steps % save == 0:
        engine.save_checkpoint(f"{folder}/checkpoints")
engine.destroy()
"""
NODES = 3
LOSE_AT, LAST = 20, 40
"""Steps that have been taken when the node is lost, and at the end."""
SAVE = 8
"""Steps between two checkpoints of a job that loses its launcher."""
ROUNDING = 1e-5
"""How much, of itself, a loss on two nodes may differ from the one on three."""
PATIENCE = 90.0
"""Seconds without which a job hangs, and within which the processes of a host must end."""
RUN = [sys.executable, "-m", "shoal", "run", "--no-bind-cores", "--max-restarts", "3", "--grace", "1"]
SOME = ["--nodes", f"{NODES - 1}:{NODES}"]
KINDS = {"link": "link of a host down", "store": "first host, with the store, gone", "launcher": "host of the launcher gone"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What came of a lost node."""

    back: float
    """Seconds until the others had taken a step."""
    new: float
    """Seconds until they had taken one that had not been taken before."""
    again: int
    """Steps that were taken twice."""
    difference: float
    """The most by which a loss differs from that of an undisturbed job, of itself; infinite for any bit before the loss."""
    once: bool
    """Each sample was used once."""
    orphans: int
    """Processes of the job that no host has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """What the ranks of a job have noted."""

    done: list[tuple[int, int, float, int]]
    """Step, ranks, moment, and the process of the agent of rank 0, in order."""
    losses: dict[tuple[int, int], dict[int, float]]
    """Step and ranks -> rank -> the loss of its samples."""
    samples: dict[tuple[int, int], list[int]]

    @classmethod
    def read(cls, folder: Path) -> Notes:
        """Read the notes of a job, of which whole lines count."""
        text = (folder / "notes").read_text() if (folder / "notes").exists() else ""
        found = cls(done=[], losses={}, samples={})
        for line in text[:text.rfind("\n") + 1].splitlines():
            match line.split():
                case ["has", step, ranks, moment, agent]:
                    found.done.append((int(step), int(ranks), float(moment), int(agent)))
                case ["takes", step, ranks, rank, loss, *samples]:
                    key = int(step), int(ranks)
                    found.losses.setdefault(key, {})[int(rank)] = float(loss)
                    found.samples.setdefault(key, []).extend(map(int, samples))
        return found

    def counts(self, step: int) -> tuple[int, int]:
        """Return the key of a step as it was taken last: on fewer ranks, where it was taken twice."""
        return min(key for key in self.losses if key[0] == step)

    def difference(self, plain: Notes) -> float:
        """Return `Loss.difference` from a job that lost nothing."""
        most = 0.0
        for key, mine in self.losses.items():
            expected = plain.losses[plain.counts(key[0])]
            if key[1] == NODES:
                most = max(most, 0.0 if all(expected[rank] == loss for rank, loss in mine.items()) else float("inf"))
            elif len(mine) == key[1]:  # all ranks of the step; the batch is divided equally
                most = max(most, abs(statistics.mean(mine.values()) / statistics.mean(expected.values()) - 1))
        return most

    def once(self, plain: Notes) -> bool:
        """Whether each sample of the steps was used once, in the steps that count."""
        used = [sample for step in range(1, LAST + 1) for sample in self.samples[self.counts(step)]]
        return len(used) == len(set(used)) and set(used) == {each for ids in plain.samples.values() for each in ids}


def loss(notes: Notes, plain: Notes, began: float, orphans: int) -> Loss:
    """Return what came of a node that was lost at the moment `began`."""
    last = max(step for step, ranks, *_ in notes.done if ranks == NODES)
    after = [(step, moment) for step, ranks, moment, _ in notes.done if ranks < NODES]
    return Loss(back=after[0][1] - began, new=next(moment for step, moment in after if step > last) - began,
                again=last - after[0][0] + 1, difference=notes.difference(plain), once=notes.once(plain), orphans=orphans)


def wait_for(folder: Path, *, step: int) -> Notes:
    """Wait until a step has been taken, and return the notes."""
    deadline = time.monotonic() + PATIENCE
    while not (notes := Notes.read(folder)).done or notes.done[-1][0] < step:
        if time.monotonic() > deadline:
            raise SystemExit(f"step {step} was not taken within {PATIENCE:g} s; the last one was {notes.done[-1:]}")
        time.sleep(0.01)
    return notes


# Nodes that are processes of this machine


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`."""
    below: list[int] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        below += [int(child), *descendants(int(child))]
    return below


def by_hand(script: list[str]) -> list[list[str]]:
    """Return the commands of three nodes that meet at the first of them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return [[*RUN, *SOME, "--ranks", "1", "--rendezvous", f"127.0.0.1:{port}", "--node-rank", str(node), *script]
            for node in range(NODES)]


def by_launcher(script: list[str]) -> list[list[str]]:
    """Return the command that starts three hosts, all of which are this machine."""
    return [[*RUN, *SOME, "--hosts", f"{socket.gethostname()}:0@localhost:0@127.0.0.1:0", *script]]


def left_over(folder: Path) -> int:
    """Return how many processes run with `folder` on their command line."""
    word, count = str(folder).encode(), 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            count += entry.name.isdecimal() and word in (entry / "cmdline").read_bytes()
    return count


def lose(start: Callable[[list[str]], list[list[str]]], kind: str, folder: Path, plain: Notes) -> Loss:
    """Train on three nodes of this machine, lose one, and follow the others to the last step."""
    commands = start([str(folder.parent / "train.py"), str(folder), str(LAST), "0"])
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
               for command in commands]
    lost: list[int] = []
    try:
        notes = wait_for(folder, step=LOSE_AT)
        agent = notes.done[-1][3] if len(commands) == 1 else started[-1].pid
        lost = [agent, *(descendants(agent) if kind == "frozen" else [])]
        began = time.monotonic()
        for pid in lost:
            os.kill(pid, signal.SIGSTOP if kind == "frozen" else signal.SIGKILL)
        wait_for(folder, step=LAST)
        for process in started:
            if process.pid != agent:
                process.wait(PATIENCE)
    finally:
        for pid in lost if kind == "frozen" else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.kill()
            process.wait()
    return loss(Notes.read(folder), plain, began, wait_until_gone(lambda: left_over(folder)))


def wait_until_gone(count: Callable[[], int]) -> int:
    """Wait until no process is left, for `PATIENCE` seconds; return how many are."""
    deadline = time.monotonic() + PATIENCE
    while (left := count()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


# Machines


def job_on(machines: Machines, host: int, hosts: list[int], folder: Path, save: int, leave: ExitStack,
           ) -> subprocess.Popen[bytes]:
    """Start the training on `hosts`, by a launcher on `host`; leaving `leave` ends it."""
    names = "@".join(f"{machines.names[number]}:0" for number in hosts)
    some = SOME if len(hosts) == NODES else []
    command = [*RUN, *some, "--hosts", names, str(folder.parent / "train.py"), str(folder), str(LAST), str(save)]
    with (folder / "log").open("ab") as log:
        process = machines.popen(host, command, stdout=log, stderr=log)
    leave.callback(process.wait)
    leave.callback(process.kill)
    return process


def lose_machine(kind: str, folder: Path, plain: Notes | None) -> Loss | Notes:
    """Train on three machines and lose one, or none without `plain`: then return the notes."""
    with Machines(NODES) as machines, ExitStack() as leave:
        save = SAVE if kind == "launcher" else 0
        job = job_on(machines, 0, [1, 2, 0], folder, save, leave)
        if plain is None:
            job.wait(PATIENCE)
            return wait_for(folder, step=LAST)
        wait_for(folder, step=LOSE_AT)
        lost = {"link": 2, "store": 1, "launcher": 0}[kind]
        began = time.monotonic()
        machines.execute(lost, ["ip", "link", "set", "eth0", "down"])
        if kind != "link":
            machines.end(lost)
        if kind == "launcher":
            left = wait_until_gone(lambda: python_on(machines, [1, 2]))
            job = job_on(machines, 1, [1, 2], folder, save, leave)
        wait_for(folder, step=LAST)
        job.wait(PATIENCE)
        orphans = wait_until_gone(lambda: python_on(machines, [host for host in range(NODES) if machines.runs(host)]))
        return loss(Notes.read(folder), plain, began, orphans + (left if kind == "launcher" else 0))


def python_on(machines: Machines, hosts: list[int]) -> int:
    """Return how many processes of Python run on some machines."""
    return sum(len(machines.processes_of(host, "python")) for host in hosts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="losses of each kind (3)")
    parser.add_argument("--machines", action="store_true", help="hosts of network namespaces")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), help="what machines lose (all)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/node-loss.json)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, list[Loss]] = {}
    with tempfile.TemporaryDirectory() as name:
        def new() -> Path:
            return Path(tempfile.mkdtemp(dir=name))

        Path(name, "train.py").write_text(TRAIN)
        try:
            if options.machines:
                plain = lose_machine("none", new(), None)
                assert isinstance(plain, Notes)
                tried = [(f"machines, {KINDS[kind]}", lambda kind=kind: lose_machine(kind, new(), plain))
                         for kind in options.kinds]
            else:
                folder = new()
                subprocess.run([*RUN, "--ranks", str(NODES), f"{name}/train.py", folder, str(LAST), "0"], check=True,
                               stdout=subprocess.DEVNULL)
                plain = Notes.read(folder)
                tried = [(f"{start.__name__}, {kind}", lambda start=start, kind=kind: lose(start, kind, new(), plain))
                         for start in (by_hand, by_launcher) for kind in ("killed", "frozen")]
            for what, once in tried:
                for _ in range(options.rounds):
                    found.setdefault(what, []).append(each := once())
                    print(f"{what}: back {each.back:.1f} s, new step {each.new:.1f} s, {each.again} steps again, "
                          f"{each.orphans} orphans, losses within {each.difference:.1e}", flush=True)
        except HostsUnavailable as reason:
            print(f"skipped: {reason}")
            return 0
    return report(options, found)


def report(options: argparse.Namespace, found: dict[str, list[Loss]]) -> int:
    """Print and keep the table; return 0 where every promise that is no duration is kept."""
    rows = [(what, str(len(some)), *(f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})" for times in (
        [each.back for each in some], [each.new for each in some])), str(max(each.again for each in some)))
            for what, some in found.items()]
    sheet = Sheet(title="Seconds after the loss: median (least to most)", rows=tuple(rows),
                  columns=("loss", "count", "train", "new step", "steps again, most"))
    every = [each for some in found.values() for each in some]
    exact = [
        Target(what="orphans, on all hosts", measured=sum(each.orphans for each in every), high=0),
        Target(what="jobs that used each sample once", measured=sum(each.once for each in every), low=len(every),
               high=len(every)),
        Target(what="losses: bitwise before the loss, and after it within, of themselves", high=ROUNDING,
               measured=max(each.difference for each in every))]
    lasting = [Target(what=f"{what}: until the others train, median", high=12, unit=" s",
                      measured=statistics.median(each.back for each in some))
               for what, some in found.items() if KINDS["launcher"] not in what]
    note = (f"{NODES} nodes of a rank each, stage 3, a copy every step, lost after {LOSE_AT} steps; load "
            f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors at the end")
    Outcome(benchmark="node-loss", command=" ".join(["python", *sys.argv]), note=note, sheets=(sheet,),
            targets=(*exact, *lasting), raw={what: [asdict(each) for each in some] for what, some in found.items()},
            ).publish(options.out)
    return 0 if all(target.met for target in exact) else 1


if __name__ == "__main__":
    sys.exit(main())
