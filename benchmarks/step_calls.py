"""How much of the library one step runs through: files entered, and calls between files, of one backward and one step.

    python benchmarks/step_calls.py [--stage 2] [--ranks 2]

Rank 0 trains an MLP in fp32 by AdamW with default settings and traces the second iteration, all of its threads, from
`engine.backward(loss)` to the end of `engine.step()`. A call between files is a distinct triple of calling file, called
file and called function; where torch is in between (autograd, hooks, context managers), the caller is the innermost
function of this library on the stack. Nested functions, comprehensions and properties count like any function.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from results import Outcome, Sheet, Target
from torch import nn

import shoal
from shoal.testing import run_ranks

LIBRARY = str(Path(shoal.__file__).parent)
FILES, CALLS = 18, 30
"""The most that are expected at stage 2."""


@dataclass(slots=True)
class Trace:
    """The files of the library that were entered, and the calls between them: (caller, called file, function)."""

    files: set[str] = field(default_factory=set[str])
    calls: set[tuple[str, str, str]] = field(default_factory=set[tuple[str, str, str]])
    on: bool = False

    def event(self, frame: FrameType, event: str, _: object) -> None:
        """Take note of a call, as `sys.setprofile` asks."""
        here = frame.f_code.co_filename
        if not self.on or event != "call" or not here.startswith(LIBRARY):
            return
        self.files.add(here)
        caller = frame.f_back
        while caller and not caller.f_code.co_filename.startswith((LIBRARY, __file__)):
            caller = caller.f_back
        if caller and caller.f_code.co_filename not in (here, __file__):
            self.calls.add((caller.f_code.co_filename, here, frame.f_code.co_qualname))


@contextmanager
def traced(trace: Trace) -> Generator[None, None, None]:
    """Trace this thread, and those that start within the context."""
    threading.setprofile(trace.event)
    sys.setprofile(trace.event)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  None ends it


def step_calls(stage: int) -> dict[str, Any]:
    """Train two iterations on this rank, and return what the second one entered and called, with paths in the library."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    trace = Trace()
    with traced(trace):
        engine = shoal.initialize(model=model, config={
            "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage}})[0]
        for iteration in range(2):
            loss = engine(torch.randn(4, 64)).square().mean()
            trace.on = iteration == 1
            engine.backward(loss)
            engine.step()
            trace.on = False
    files = sorted(map(_short, trace.files))
    calls = sorted((_short(caller), _short(callee), function) for caller, callee, function in trace.calls)
    return {"files": files, "calls": calls}


def _short(path: str) -> str:
    return str(Path(path).relative_to(LIBRARY))


def outcome(found: dict[str, Any], stage: int, ranks: int) -> Outcome:
    """Lay out what was counted."""
    files, calls = len(found["files"]), len(found["calls"])
    targets = (Target(what="files entered", measured=files, high=FILES),
               Target(what="calls between files", measured=calls, high=CALLS)) if stage == 2 else ()
    pairs = len({(caller, callee) for caller, callee, _ in found["calls"]})
    return Outcome(
        benchmark="step_calls", command=" ".join(["python", *sys.argv]), raw=found | {"stage": stage, "ranks": ranks},
        note=f"One backward and one step at stage {stage} in fp32 on {ranks} ranks, traced on rank 0.", targets=targets,
        sheets=(Sheet(title="Calls between files", columns=("caller", "called", "function"), rows=tuple(found["calls"])),
                Sheet(title="Structure", columns=("", "count"), rows=(
                    ("files entered", str(files)), ("calls between files", str(calls)),
                    ("pairs of files with a call", str(pairs))))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=range(4), help="ZeRO stage (2)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (2)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/step_calls.json)")
    options = parser.parse_args()
    found = run_ranks(options.ranks, step_calls, options.stage)[0]
    outcome(found, options.stage, options.ranks).publish(options.out)


if __name__ == "__main__":
    main()
