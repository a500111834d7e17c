"""What a session on a bare machine with one GPU measures, in three commands of at most ten minutes each.

    python benchmarks/gpu_campaign.py                      what is missing here
    python benchmarks/gpu_campaign.py --pack FOLDER        wheels to carry to a machine without a network
    python benchmarks/gpu_facts.py  [--small]              1: speeds of the machine, stages, tests, races
    python benchmarks/gpu_steps.py  [--small]              2: a step of 1.1 B, and where its time goes
    python benchmarks/gpu_states.py [--small]              3: state on the host and on disk, 2 to 7 B

There: `pip install --no-index --no-deps --find-links FOLDER shoal pydantic ...`, as `--pack` prints it, with `--python` for
the version of Python there. Each row runs in processes of its own, which end with it, and the JSON is written after each. A
row tells what it has found so far (`tell`): one that fails, or has no time left, loses only what it has not measured yet.
Each has a share of the time for itself, and what the rows before it have left of theirs.
With --small the same code runs in seconds, on the CPU too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["Row", "Scale", "campaign", "missing", "tell"]

MINUTES = 9.5
"""Of a command; the rest of the ten is for the start."""

CARRIED = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "rich", "markdown_it_py", "mdurl",
           "pygments", "safetensors", "numpy", "pytest", "pytest_timeout", "packaging", "pluggy", "iniconfig", "hypothesis",
           "sortedcontainers")
"""What Shoal and its tests need beside torch, which can be installed without numpy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a campaign is, and where it runs."""

    device: torch.device
    small: bool
    path: str
    """A folder of the disk."""


Measured = dict[str, Any]
_TOLD = "measured: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement, in a process of its own; `environment` is set there if it has a GPU."""

    run: Callable[[Scale], Measured]
    seconds: float
    """Its share of the campaign's time: what earlier rows leave of theirs is added."""
    environment: Mapping[str, str] | None = None


def campaign(benchmark: str, file: str, what: str, rows: Mapping[str, Row]) -> None:
    """Run the rows that the command line of `file` asks for, and publish them as `benchmark`."""
    options = _options(what, rows)
    if absent := _absent():
        raise SystemExit(f"{benchmark}: {absent}")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and not options.small:
        raise SystemExit(f"{benchmark}: needs a GPU; here is none. {'; '.join(missing())}. --small tries it on the CPU")
    scale = Scale(device=accelerator or torch.device("cpu"), small=options.small, path=options.path)
    if options.child:
        tell(rows[options.child].run(scale))
        return
    Path(options.path).mkdir(parents=True, exist_ok=True)
    end, found = time.monotonic() + 60 * MINUTES, dict[str, Measured]()
    for name in options.rows:
        left = end - time.monotonic()
        seconds = left if options.small else share(rows, options.rows, name, left)
        found[name] = _child(file, name, rows[name], seconds, options) if left > 5 else {"failure": "no time was left"}
        sys.stderr.write(f"{name}: {_shown(found[name])}\n")
        _publish(benchmark, scale, found, options.out)
    if options.small and any("failure" in row for row in found.values()):
        raise SystemExit(1)


def share(rows: Mapping[str, Row], asked: Sequence[str], name: str, left: float) -> float:
    """Return the seconds of a row of those `asked`: its own share of the `left` ones, and all that is no later row's."""
    later = sum(rows[other].seconds for other in asked[asked.index(name) + 1:])
    return min(left, max(rows[name].seconds, left - later))


def _options(what: str, rows: Mapping[str, Row]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=rows, default=list(rows), help="what to measure (all)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see whether it runs; on the CPU too")
    parser.add_argument("--path", default="out/benchmarks/disk", help="a folder of the disk")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/NAME.json)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _child(file: str, name: str, row: Row, seconds: float, options: argparse.Namespace) -> Measured:
    command = [sys.executable, file, "--child", name, "--path", options.path, *(["--small"] if options.small else [])]
    environment = {**os.environ, **(row.environment or {} if torch.cuda.is_available() else {})}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, text=True, stdout=output, stderr=errors, env=environment, start_new_session=True)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks of tests too
            process.wait()
        output.seek(0)
        errors.seek(0)
        told = [json.loads(line.removeprefix(_TOLD)) for line in output if line.startswith(_TOLD) and line.endswith("\n")]
        found, stderr = told[-1] if told else {}, errors.read()
    if code is None:
        return {**found, "failure": f"did not end within {seconds:.0f} s"}
    if code:
        return {**found, "failure": next((line for line in reversed(stderr.splitlines()) if line.strip()), "killed")[:160],
                "stderr": stderr[-4000:]}
    return found


def tell(found: Measured) -> None:
    """Report what a row has found so far; each report replaces the last."""
    sys.stdout.write(f"{_TOLD}{json.dumps(found)}\n")
    sys.stdout.flush()


def _publish(benchmark: str, scale: Scale, found: dict[str, Measured], out: Path | None) -> None:
    """Write the JSON, with the tables if they can be made: the rows took minutes of a GPU, and go on without them."""
    out = out or Path(__file__).parents[1] / "out" / "benchmarks" / f"{benchmark}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"benchmark": benchmark, "raw": found}, indent=1, default=str) + "\n")
    try:
        _render(benchmark, scale, found, out)
    except Exception as error:  # whatever a table, the machine's facts or the terminal raise
        sys.stderr.write(f"{benchmark}: no tables ({type(error).__name__}: {error}); {out} has what was measured\n")


def _render(benchmark: str, scale: Scale, found: dict[str, Measured], out: Path) -> None:
    from results import Outcome, Sheet

    rows = tuple((name, _shown(measured)) for name, measured in found.items())
    name = torch.cuda.get_device_name() if scale.device.type == "cuda" else str(scale.device)
    Outcome(benchmark=benchmark, command=" ".join(["python", *sys.argv]),
            note=f"{name}{', small sizes: no figures' if scale.small else ''}.",
            sheets=(Sheet(title=benchmark, columns=("row", "measured"), rows=rows),), targets=(), raw=found).publish(out)


def _shown(measured: Measured) -> str:
    failed = [f"failed: {measured['failure']}"] if "failure" in measured else []
    return ", ".join(failed + [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                               for name, value in measured.items()
                               if not isinstance(value, (list, dict)) and name not in ("failure", "stderr")])


def missing() -> list[str]:
    """Return what a campaign lacks here."""
    lacks = [] if torch.cuda.is_available() else [f"no CUDA device (torch {torch.__version__})"]
    return [*lacks, *filter(None, [_absent()])]


def _absent() -> str:
    """Return which packages of `CARRIED` are not installed, and what to do; empty where all are."""
    absent = [] if importlib.util.find_spec("shoal") else ["shoal"]
    for name in CARRIED:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
    return f"no {', '.join(absent)}: carry the wheels that --pack collects" if absent else ""


def pack(folder: Path, python: str) -> None:
    """Collect the wheels of `CARRIED` for `python` on x86-64, and Shoal's own, and print how to install them."""
    folder.mkdir(parents=True, exist_ok=True)
    pip: Sequence[str] = [sys.executable, "-m", "pip"]
    target = ["--python-version", python, "--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_28_x86_64"]
    subprocess.run([*pip, "download", "-q", "--no-deps", "--only-binary", ":all:", *target, "-d", str(folder),
                    "-c", str(Path(__file__).parents[1] / "constraints.txt"), *CARRIED], check=True)
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(folder), str(Path(__file__).parents[1])], check=True)
    size = sum(file.stat().st_size for file in folder.iterdir())
    sys.stdout.write(f"{len(list(folder.iterdir()))} wheels, {size / 2**20:.1f} MiB. There:\n"
                     f"    pip install --no-index --no-deps {folder}/*.whl\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="collect wheels")
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}", help="of the other machine")
    options = parser.parse_args()
    if options.pack:
        pack(options.pack, options.python)
        return
    lacks = missing()
    sys.stdout.write("".join(f"missing: {what}\n" for what in lacks) or "nothing is missing\n")


if __name__ == "__main__":
    main()
