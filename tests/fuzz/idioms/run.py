"""Many programs in one process, each of whose ranks runs the engine and plain PyTorch side by side."""

from __future__ import annotations

import json
import tempfile
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shoal
from shoal.errors import ShoalError
from shoal.testing import RankFailed, run_ranks

from .model import ByEngine, ByTorch, Net, Trained
from .operations import OPERATIONS, Found
from .program import Program, draw

TIMEOUT = 20
KINDS = ("FAILS", "refused", "invalid", "equal")
TOLERANCE, ROUNDING = 2e-4, 2e-6
"""How far a tensor may be from plain PyTorch's: a part of its norm, and so much for each element."""
LEARNING: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.02}, "AdamW": {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.01}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program went."""

    seed: int
    kind: str
    """'equal', 'refused' by a `ShoalError`, 'invalid' in plain PyTorch too, or 'FAILS': of `KINDS`."""
    text: str = ""


def run_many(seeds: list[int], ranks: int) -> list[Outcome]:
    """Run the programs of `seeds`, which take so many ranks. One that ends the process fails; the others run in another."""
    found: list[Outcome] = []
    while len(found) < len(seeds):
        left = seeds[len(found):]
        with tempfile.TemporaryDirectory() as folder:
            done = Path(folder) / "done"
            done.touch()
            try:
                run_ranks(ranks, run_in_turn, left, folder)
                error = None
            except RankFailed as failed:
                error = str(failed)
            now = [Outcome(**json.loads(line)) for line in done.read_text().splitlines()]
        if error is not None and len(now) < len(left):
            now.append(Outcome(seed=left[len(now)], kind="FAILS", text=error))
        found += now
    return found


def run_in_turn(seeds: list[int], folder: str) -> None:
    """Run programs on this rank until one fails on any; rank 0 writes how each went."""
    for seed in seeds:
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, run(draw(seed), f"{folder}/{seed}"))
        worst = min(outcomes, key=lambda outcome: KINDS.index(outcome.kind))
        if dist.get_rank() == 0:
            with (Path(folder) / "done").open("a") as done:
                done.write(json.dumps(asdict(worst)) + "\n")
        if worst.kind == "FAILS":
            return


def run(program: Program, folder: str) -> Outcome:
    """Run a program on this rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = _engine(program, folder)
        plain = _plain(program)
        try:
            for number, step in enumerate(program.steps):
                where = f"operation {number + 1}, {step.name}"
                ours, theirs = (_do(trained, step.name, step.seed) for trained in (engine, plain))
                if isinstance(theirs, Exception):
                    fine = isinstance(ours, Exception)
                    return _outcome(program, "invalid" if fine else "FAILS",
                                    f"{where}: plain PyTorch raises {_last(theirs)}, the engine nothing")
                if isinstance(ours, Exception):
                    kind = "refused" if isinstance(ours, ShoalError) else "FAILS"
                    return _outcome(program, kind, f"{where}: {_last(ours)}" if kind == "refused" else
                                    f"{where}:\n" + "".join(traceback.format_exception(ours)))
                if differs := _differences(ours, theirs):
                    return _outcome(program, "FAILS", f"{where}: {differs}")
            for name in ("compare what hooks saw", "compare weights"):
                if differs := _differences(OPERATIONS[name].run(engine, Random()), OPERATIONS[name].run(plain, Random())):
                    return _outcome(program, "FAILS", f"at the end, {name}: {differs}")
        finally:
            _end(engine)
    return _outcome(program, "equal", "")


def _outcome(program: Program, kind: str, text: str) -> Outcome:
    return Outcome(seed=program.seed, kind=kind, text=text)


def _do(trained: Trained, name: str, seed: int) -> Found | Exception:
    try:
        return OPERATIONS[name].run(trained, Random(seed))
    except Exception as error:
        return error


def _last(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _differences(ours: Found, theirs: Found) -> str:
    """Say how two lists of tensors differ; nothing if they do not."""
    if len(ours) != len(theirs):
        return f"{len(ours)} tensors instead of {len(theirs)}"
    for number, (found, wanted) in enumerate(zip(ours, theirs, strict=True)):
        if found.shape != wanted.shape:
            return f"tensor {number} has the shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
        if not _close(found, wanted):
            return (f"tensor {number} of {tuple(found.shape)} is {float((found - wanted).norm()):.3g} apart from plain "
                    f"PyTorch's, whose norm is {float(wanted.norm()):.3g}")
    return ""


def _close(found: Tensor, wanted: Tensor) -> bool:
    if not wanted.isfinite().all():  # a program that diverges does so in both trainings
        return not found.isfinite().all()
    return bool((found - wanted).norm() <= TOLERANCE * wanted.norm() + ROUNDING * wanted.numel() ** 0.5)


def _net(program: Program) -> Net:
    torch.manual_seed(program.seed)
    return Net(program.blocks, tied=program.tied, recompute=program.recompute, frozen=program.frozen)


def _engine(program: Program, folder: str) -> ByEngine:
    zero: dict[str, Any] = {"stage": program.stage, "stage3_param_persistence_threshold": program.persistent}
    if not program.reuse:
        zero |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for what, device in (tier.split() for tier in program.tiers):
        zero[f"offload_{what}"] = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    engine = shoal.initialize(model=_net(program), config={
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": program.accumulation, "gradient_clipping": 0.0,
        "timeout": TIMEOUT, "log_level": "error", "zero_optimization": zero,
        "optimizer": {"type": program.optimizer, "params": LEARNING[program.optimizer]}})[0]
    return ByEngine(engine, f"{folder}/checkpoint", persistent=program.persistent)


def _plain(program: Program) -> ByTorch:
    net = _net(program)
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, program.optimizer)
    optimizer = kind([each for each in net.parameters() if each.requires_grad], **LEARNING[program.optimizer])
    return ByTorch(net, optimizer, program.accumulation)


def _end(trained: ByEngine) -> None:
    trained.losses.clear()
    trained.kept.clear()
    trained.engine.destroy()
