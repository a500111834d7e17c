"""One rank, several ranks, and several ranks that send less: who learns soonest which docstring belongs to which function?

    python examples/rscan/compare.py --ranks 2

Each run is `train.py` under `shoal run`, one after the other; with `--slow RATE` those of several ranks are spread over two
hosts, network namespaces whose link has that rate (benchmarks/hosts.py), which takes root.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

sys.path.append(str(Path(__file__).parents[1] / "gpt"))  # the clock of its display
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # hosts

from hosts import Hosts, HostsUnavailable
from rank_group import RankFailed, finish

from charts import System, picture, table, text_picture
from record import Record
from shoal.config.load import read
from shoal.engine.schema import Config
from shoal.errors import NotSupportedYet

HERE = Path(__file__).parent
HOSTS = 2
QUICK = ("--pairs", "256", "--every", "2")


class RunFailed(RuntimeError):
    """A run ended badly; what it said stands above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One system: which configuration on how many ranks."""

    config: str
    ranks: int

    @property
    def name(self) -> str:
        return "1 rank" if self.ranks == 1 else f"{self.ranks} ranks, {self.config}"

    @property
    def path(self) -> Path:
        return HERE / f"{self.config}.json"

    def folder(self, out: Path, seed: int) -> Path:
        """Return where the run of a seed leaves what it makes."""
        return out / f"{self.config}-{self.ranks}-seed{seed}"

    def refused(self) -> str:
        """Say what this version of shoal does not support of the configuration; nothing where it supports all."""
        try:
            Config.resolve(read(self.path), data_ranks=self.ranks)
        except NotSupportedYet as error:
            return str(error)
        return ""

    def command(self, options: argparse.Namespace, seed: int) -> list[str]:
        """Return the script and its arguments."""
        words = [str(HERE / "train.py"), "--shoal-config", str(self.path), "--name", self.name,
                 "--seed", str(seed), "--out", str(self.folder(options.out, seed)), "--cache", str(options.out)]
        if options.slow and self.ranks > 1:
            words += ["--rate", options.slow]
        if options.steps:
            words += ["--steps", str(options.steps)]
        return [*words, "--rows", str(options.rows), *(QUICK if options.quick else ())]


def main() -> None:
    options = arguments()
    console = Console()
    cases = [Case(config="dense", ranks=1), Case(config="dense", ranks=options.ranks),
             *(Case(config=config, ranks=options.ranks) for config in options.ours)]
    systems: list[System] = []
    failed = False
    for case in cases:
        if reason := case.refused():
            console.print(f"[bold]{case.name}[/]: left out: {reason}\n", highlight=False, soft_wrap=True)
            continue
        try:
            records = [run(case, options, seed) for seed in range(options.seeds)]
        except RunFailed as failure:
            failed = True
            console.print(f"[bold]{case.name}[/]: left out: {failure}", highlight=False, soft_wrap=True)
        else:
            systems.append(System(name=case.name, records=records))
        console.print()
    if not systems:
        sys.exit("rscan: no run came to its end")
    report(systems, options, console)
    if failed:
        sys.exit(1)


def run(case: Case, options: argparse.Namespace, seed: int) -> Record:
    """Train once and return the record. Raises `RunFailed`."""
    command = case.command(options, seed)
    if options.slow and case.ranks > 1:
        try:
            with Hosts(HOSTS, rate=options.slow) as hosts:
                finish(hosts.start([sys.executable, *command], case.ranks // HOSTS), seconds=float("inf"))
        except (HostsUnavailable, RankFailed) as error:
            raise RunFailed(str(error)) from error
    else:
        done = subprocess.run([sys.executable, "-m", "shoal", "run", "--ranks", str(case.ranks), *command])
        if done.returncode:
            raise RunFailed(f"it ended with status {done.returncode}")
    return Record.load(case.folder(options.out, seed) / "record.json")


def report(systems: Sequence[System], options: argparse.Namespace, console: Console) -> None:
    """Print the table, draw the curves, and say where they are."""
    where = f"hosts at {options.slow}" if options.slow else "ranks of one machine"
    title = f"RScan: {options.rows:,} words, {where}"
    files = [options.out / f"auc.{kind}" for kind in ("svg", "png")]
    picture(files, systems, options.target, title)
    console.print(table(systems, options.target, title))
    console.print(text_picture(systems, options.target))
    console.print(f"\nAUC over samples and over seconds: {files[0]}, {files[1]}", highlight=False, soft_wrap=True)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the runs with several (default 2)")
    parser.add_argument("--ours", nargs="+", default=["sparse"], choices=("sparse", "onebit"),
                        help="configurations that are laid beside the dense one (default sparse)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, with seeds 0, 1, 2 ... (default 1)")
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the table of words (default 200,000)")
    parser.add_argument("--steps", type=int, help="steps of each run (default: those of the config's cycle)")
    parser.add_argument("--target", type=float, default=0.87, help="the AUC to reach (default 0.87)")
    parser.add_argument("--slow", metavar="RATE", help="spread ranks over two hosts with a link of this rate: 200mbit ...")
    parser.add_argument("--quick", action="store_true", help="a few steps of a small table, to try it")
    parser.add_argument("--out", type=Path, default=Path("out/rscan"), help="folder for what is made (default out/rscan)")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.steps = 2000, 4
    if options.slow and options.ranks % HOSTS:
        parser.error(f"--ranks: got {options.ranks}; with --slow they are shared out over {HOSTS} hosts")
    return options


if __name__ == "__main__":
    main()
