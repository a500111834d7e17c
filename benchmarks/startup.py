"""The cost of starting: `import shoal` over `import torch`, `import deepspeed` over `import shoal`, and `shoal run` over
`torchrun` of an empty script.

    python benchmarks/startup.py [--rounds 15] [--ranks 2]

Every measurement is a fresh process; those of a round take turns, and differences are taken within the round. The import
under the published name is measured in processor time too, which a busy machine disturbs less than the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from machine import ROOT
from progress import progress
from results import Outcome, Sheet, Target

BIN = Path(sys.executable).parent
NO_DEVICE = "import torch, shoal; assert not torch.cuda.is_initialized(); assert not torch.distributed.is_initialized()"

IMPORTS = {
    "python alone": "pass",
    "import torch": "import torch",
    "import shoal": "import shoal",
    "import deepspeed": "import deepspeed",
    "import torch, shoal, shoal.initialize": "import torch, shoal; shoal.initialize",
    "import torch, deepspeed, deepspeed.initialize": "import torch, deepspeed; deepspeed.initialize",
}
"""Programs whose processor time is measured, with the wheel named `deepspeed` on the path."""


def main() -> None:
    options = _options()
    subprocess.run([sys.executable, "-c", NO_DEVICE], check=True)
    imports, uses = ([[sys.executable, "-c", code] for code in ("import torch", other)]
                     for other in ("import torch, shoal", "import torch, shoal; shoal.initialize"))
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script, progress() as tell:
        importing = _pairs("import", imports, options.rounds, tell)
        using = _pairs("use", uses, options.rounds, tell)
        runs = [[str(BIN / "torchrun"), f"--nproc-per-node={options.ranks}", "--standalone", script.name],
                [str(BIN / "shoal"), "run", "--ranks", str(options.ranks), script.name]]
        running = _pairs("run", runs, options.rounds, tell)
        processor = _processor_times(options.rounds, tell)
    rows = (_row("import torch, import torch and shoal", importing), _row("import torch, and shoal.initialize", using),
            _row("torchrun, shoal run", running))
    targets = (
        Target(what="`import shoal` over `import torch`", measured=_cost(importing), high=0.3, unit=" s"),
        Target(what="`import deepspeed` over `import shoal`, processor time", high=0.3, unit=" s",
               measured=_difference(processor, "import shoal", "import deepspeed")),
        Target(what="`shoal run` of an empty script over `torchrun`", measured=_cost(running), high=0.5, unit=" s"))
    note = (f"Fresh processes, {options.rounds} pairs in turns; {options.ranks} ranks in the runs. Importing shoal "
            f"initialised neither CUDA nor a process group.")
    columns = ("pair", "first, median s", "second, median s", "difference, median s", "least", "most")
    Outcome(benchmark="startup", command=" ".join(["python", *sys.argv]), note=note, targets=targets,
            sheets=(Sheet(title="Starting", columns=columns, rows=rows), _processor_sheet(processor)),
            raw={"import": importing, "use": using, "run": running, "processor": processor}).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="pairs of each kind (15)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the empty script (2)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/startup.json)")
    return parser.parse_args()


def _pairs(name: str, commands: list[list[str]], rounds: int, tell: Callable[[str], None]) -> list[tuple[float, float]]:
    first, second = commands
    for command in commands:
        _seconds(command)  # files come into the page cache
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        tell(f"{name}: pair {number + 1} of {rounds}")
        if number % 2:
            later = _seconds(second)
            pairs.append((_seconds(first), later))
        else:
            pairs.append((_seconds(first), _seconds(second)))
    return pairs


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return time.perf_counter() - start


def _processor_times(rounds: int, tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the processor seconds of each program, one for each round, of which the programs take turns."""
    found: dict[str, list[float]] = {name: [] for name in IMPORTS}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(ROOT / "tools" / "deepspeed_wheel.py"), folder], check=True,
                       stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})
        wheel, = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folder}
        for number in range(rounds + 1):
            tell(f"processor time: round {number} of {rounds}")
            for name, code in IMPORTS.items():
                seconds = _processor_seconds([sys.executable, "-c", code], environment)
                if number:  # the first brings files into the page cache
                    found[name].append(seconds)
    return found


def _processor_seconds(command: list[str], environment: Mapping[str, str]) -> float:
    """Return the user and system seconds of a process."""
    _, status, used = os.wait4(os.posix_spawn(command[0], command, environment), 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return used.ru_utime + used.ru_stime


def _difference(times: Mapping[str, list[float]], first: str, second: str) -> float:
    return statistics.median(later - earlier for earlier, later in zip(times[first], times[second], strict=True))


def _processor_sheet(times: Mapping[str, list[float]]) -> Sheet:
    rows = tuple((name, f"{statistics.median(values):.3f}", f"{_difference(times, 'python alone', name):.3f}",
                  f"{min(values):.3f}", f"{max(values):.3f}") for name, values in times.items())
    return Sheet(title="Imports, processor time of a fresh process",
                 columns=("program", "median s", "over python alone, median s", "least", "most"), rows=rows)


def _cost(pairs: list[tuple[float, float]]) -> float:
    return statistics.median(second - first for first, second in pairs)


def _row(name: str, pairs: list[tuple[float, float]]) -> tuple[str, ...]:
    differences = [second - first for first, second in pairs]
    seconds = (statistics.median(first for first, _ in pairs), statistics.median(second for _, second in pairs),
               statistics.median(differences), min(differences), max(differences))
    return name, *(f"{value:.2f}" for value in seconds)


if __name__ == "__main__":
    main()
