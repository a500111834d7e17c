"""Seconds until the script runs on all ranks: `shoal run` on three hosts by ssh, beside the same ranks on one host.

    python benchmarks/hosts_startup.py [--rounds 9] [--hosts 3]

The hosts are machines of network namespaces with an ssh server each (`machines.py`), on the processors of this machine. Each
launch starts one rank for each host, or that many on one host; the two take turns. It lasts from the command to the first
line of the script on the last rank, and to the end of the launcher. Needs root, iproute2 and openssh-server.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from machines import Machines
from progress import progress
from results import Outcome, Sheet, Target, quartiles

SCRIPT = "import time\nprint('begun', time.monotonic(), flush=True)\n"
RUN = [sys.executable, "-m", "shoal", "run"]


def main() -> None:
    """Time the launches in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="pairs of launches (9)")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/hosts-startup.json)")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"one host": [], f"{options.hosts} hosts by ssh": []}
    with tempfile.TemporaryDirectory() as folder, Machines(options.hosts) as machines, progress() as tell:
        script, hostfile = Path(folder) / "empty.py", Path(folder) / "hosts"
        script.write_text(SCRIPT)
        hostfile.write_text("".join(f"{name} slots=1\n" for name in machines.names))
        commands = dict(zip(found, ([*RUN, "--ranks", str(options.hosts), script], [*RUN, "--hostfile", hostfile, script]),
                            strict=True))
        for number in range(-1, options.rounds):
            for system in sorted(found, reverse=number % 2 == 1):
                tell(f"{system}: launch {number + 1} of {options.rounds}")
                seconds = launch(machines, commands[system], options.hosts)
                if number >= 0:  # the first brings files into the page cache
                    found[system].append(seconds)
    report(options, found)


def launch(machines: Machines, command: list[str | Path], ranks: int) -> tuple[float, float]:
    """Return the seconds until the last rank has begun, and until the launcher has ended."""
    begin = time.monotonic()
    done = machines.execute(0, command, env={"OMP_NUM_THREADS": "1"})
    end = time.monotonic()
    begun = [float(line.rsplit("begun ", 1)[1]) for line in done.stdout.splitlines() if "begun " in line]
    if done.returncode or len(begun) != ranks:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return max(begun) - begin, end - begin


def report(options: argparse.Namespace, found: dict[str, list[tuple[float, float]]]) -> None:
    """Print and keep the table."""
    one, many = found.values()
    more = [there[0] - here[0] for here, there in zip(one, many, strict=True)]
    rows = tuple((name, *(f"{value:.2f}" for value in (statistics.median(begun for begun, _ in times), min(times)[0],
                                                       max(times)[0], statistics.median(ended for _, ended in times))))
                 for name, times in found.items())
    sheet = Sheet(title="Seconds of a launch", rows=rows,
                  columns=("ranks on", "last rank begins, median", "least", "most", "launcher ends, median"))
    low, middle, high = quartiles(more)
    target = Target(what=f"{options.hosts} hosts by ssh over one host, until the last rank begins", high=2.0, unit=" s",
                    measured=middle, spread=(low, high))
    note = f"{options.rounds} pairs in turns, {options.hosts} ranks each; all hosts share this machine's processors."
    Outcome(benchmark="hosts-startup", command=" ".join(["python", *sys.argv]), note=note, sheets=(sheet,),
            targets=(target,), raw=found).publish(options.out)


if __name__ == "__main__":
    main()
