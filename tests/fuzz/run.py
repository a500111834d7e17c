"""The training of a composition by the engine, and what differs from plain PyTorch.

Weights are compared bit by bit where nothing was computed: before the first step, and after a load. Losses, norms and
trained weights are compared within the tolerances of `TOLERANCES`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.sequence_parallel import SequenceAxis
from shoal.tensor_parallel import parallelize
from shoal.testing import RankFailed, run_ranks

from . import plain
from .draw import Composition, JobDraw
from .model import groups, line, loss_of, microbatch, plan, specs
from .plain import LOSS_SCALE, Trained, build_optimizer, optimizer_of, schedule_of

TIMEOUT = 60
"""Seconds that a collective of the engine may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The tolerances between the engine and plain PyTorch."""

    loss: float
    """Relative."""
    norm: float
    """Relative."""
    weight: float
    """L2 norm over the elements of a tensor, relative to that of what training has changed of it."""


ROUNDING = 2**-20
"""The least tolerance of each element of a weight: weights are of order 1, and every step rounds them."""
TOLERANCES = {"fp32": Tolerance(loss=1e-5, norm=1e-4, weight=1e-3), "bf16": Tolerance(loss=1e-2, norm=5e-2, weight=0.15),
              "fp16": Tolerance(loss=5e-3, norm=2e-2, weight=0.05)}
"""By dtype. In fp32 sums are taken in another order; in 16 bits a rounding of a weight, an activation or a gradient may
fall to the other side, and tensor ranks round the parts of a sum."""
LEAST_OF_WEIGHTS = {("Lion", "fp32"): 0.5, ("Lion", "bf16"): 0.5, ("Lion", "fp16"): 0.5, ("Lamb", "bf16"): 0.5,
                    ("OneBitLamb", "bf16"): 0.5, ("Lamb", "fp16"): 0.2, ("OneBitLamb", "fp16"): 0.2}
"""The least tolerance of weights of an optimizer and a dtype. Lion steps by signs, and a gradient of rounding error may have
the other one. LAMB steps by a multiple of the weight's norm: the rounding of a bias that began at zero grows with it."""
OTHER_SIGNS = {"Lion": 2}
"""The elements of a tensor, by optimizer, that may step the other way once without any share of what training has moved: a
bias of eight elements moves so little in two steps that one of them is more than half of it."""


def differences(composition: Composition) -> list[str]:
    """Train by the engine and by plain PyTorch, and return what differs; nothing if all agrees."""
    expected = plain.train(composition)
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="shoal-fuzz-") as folder:
        before = dict[str, Tensor]()
        trained = [name for name, parameter in line(composition.model).named_parameters(remove_duplicate=False)
                   if parameter.requires_grad]
        for number, (job, wanted) in enumerate(zip((composition.first, composition.second), expected, strict=True)):
            try:
                ranks = run_ranks(job.ranks, train, composition, number, folder)
            except RankFailed as error:
                return [*found, f"topology {number + 1} failed: {error}"]
            start = wanted.start | before
            found += [f"topology {number + 1}: {each}" for each in _compare(job, composition, start, ranks, wanted,
                                                                                     expected[0].start)]
            before = {name: ranks[0].end[name] for name in trained if name in ranks[0].end}
    return found


def train(composition: Composition, number: int, folder: str) -> Trained:
    """Train on the first topology and save, or load and train on the second; on every rank."""
    job = (composition.first, composition.second)[number]
    engine = _engine(composition, job, folder)
    if number == 1:
        engine.load_checkpoint(folder)
    start, losses, norms = engine.consolidated_state_dict(torch.float32), list[float](), list[float | None]()
    for step in range(number * composition.steps, (number + 1) * composition.steps):
        losses.append(_step(engine, composition, job, step))
        norms.append(engine.get_global_grad_norm())
    if number == 0:
        engine.save_checkpoint(folder)
        engine.wait_for_checkpoint()
    end = engine.consolidated_state_dict(torch.float32)
    engine.destroy()
    return Trained(losses=losses, norms=norms, start=start or {}, end=end or {})


def settings(composition: Composition, job: JobDraw, folder: str) -> dict[str, Any]:
    """Return the configuration."""
    zero = dict(job.zero)
    for section, device in job.tiers:
        zero[section] = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    if job.in_backward:
        zero["offload_optimizer"] = {"step_in_backward": True, **zero.get("offload_optimizer", {})}
    precision = {"fp32": {}, "bf16": {"bf16": {"enabled": True, "check_grad_overflow": not job.in_backward}},
                 "fp16": {"fp16": {"enabled": True, "loss_scale": LOSS_SCALE}}}[job.dtype]
    named = {"optimizer": {"type": composition.optimizer, "params": dict(composition.arguments)}}
    if composition.optimizer == "Adam":
        named["optimizer"]["params"]["adam_w_mode"] = False
    return {"train_micro_batch_size_per_gpu": composition.micro, "gradient_accumulation_steps": job.accumulation,
            "gradient_clipping": composition.clipping, "timeout": TIMEOUT, "log_level": "error", "zero_optimization": zero,
            "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32", **precision,
            **(named if composition.given == "name" else {}), **dict(job.settings)}


def _engine(composition: Composition, job: JobDraw, folder: str) -> Any:
    mesh = shoal.Mesh(pipeline=job.pipeline, sequence=job.sequence, tensor=job.tensor, replica=job.replica)
    config = settings(composition, job, folder)
    model = _model(composition, job, config, SequenceAxis(mesh.group("sequence")) if job.sequence > 1 else None)
    if job.tensor > 1:
        parallelize(model, mesh.group("tensor"), plan(composition.model), stages=mesh.group("pipeline"))
    optimizer: Any = None
    if composition.given == "instance" and any(each.requires_grad for each in model.parameters()):
        optimizer = optimizer_of(composition, model)
    elif composition.given != "name":  # a stage that trains nothing has no parameters for an instance
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return build_optimizer(composition, parameters)
    return shoal.initialize(
        model=model, config=config, mpu=mesh, optimizer=optimizer,
        model_parameters=groups(model) if composition.groups and not isinstance(optimizer, torch.optim.Optimizer) else None,
        lr_scheduler=None if composition.decay is None else lambda inner: schedule_of(composition, inner))[0]


def _model(composition: Composition, job: JobDraw, config: dict[str, Any], axis: SequenceAxis | None) -> nn.Module:
    drawn = composition.model
    if job.schedule is not None:
        return shoal.PipelineModule(
            specs(drawn, axis), num_stages=job.pipeline, loss_fn=partial(loss_of, axis=axis), seed_layers=True,
            base_seed=drawn.seed, partition_method=job.boundaries, schedule=job.schedule,
            stages_per_rank=job.stages_per_rank,
            activation_checkpoint_interval=job.recompute)
    with shoal.zero.Init(config=config, enabled=job.sharded_build):
        model = line(drawn, axis)
    model.recompute, model.reentrant = job.recompute, job.reentrant
    return model


def _step(engine: Any, composition: Composition, job: JobDraw, step: int) -> float:
    """Train one step; return its mean loss over all ranks."""
    rank = engine.mesh.rank("data")
    batches = [microbatch(composition.model, composition.micro, step, rank, number) for number in range(job.accumulation)]
    axis = engine.sequence if job.sequence > 1 else None
    if axis is not None:
        batches = [_part(engine, *batch) for batch in batches]
    if job.schedule is not None:
        return engine.train_batch(iter(batches)).item()
    total = torch.zeros((), dtype=torch.float64)
    for inputs, labels in batches:
        loss = loss_of(engine(inputs), labels, axis)
        engine.backward(loss)
        engine.step()
        total += loss.item()
    dist.all_reduce(total)
    return total.item() / (job.accumulation * job.ranks)


def _part(engine: Any, inputs: tuple[Tensor, Tensor], labels: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return this rank's part of a microbatch, padded so that the sequence ranks divide it."""
    tokens, positions = inputs
    part = engine.split_sequence({"input_ids": tokens, "position_ids": positions, "shift_labels": labels})
    return (part["input_ids"], part["position_ids"]), part["shift_labels"]


def _compare(job: JobDraw, composition: Composition, start: dict[str, Tensor], ranks: list[Trained],
             wanted: Trained, origin: dict[str, Tensor]) -> Iterator[str]:
    """Yield what differs between the ranks' training and the one that is wanted, which begins with the weights `start`.

    Rounding adds up over all steps since `origin`, the weights before the first topology: so its tolerance is a share of how
    far these steps moved a weight.
    """
    first = ranks[0]
    dtypes = {composition.first.dtype, job.dtype}
    dtype = next(dtype for dtype in ("bf16", "fp16", "fp32") if dtype in dtypes)
    tolerance = TOLERANCES[dtype]
    weight_tolerance = max(tolerance.weight, LEAST_OF_WEIGHTS.get((composition.optimizer, dtype), 0.0))
    for rank, other in enumerate(ranks):
        if (other.losses, other.norms) != (first.losses, first.norms):
            yield f"rank {rank} has losses {other.losses} and norms {other.norms}, rank 0 {first.losses} and {first.norms}"
    if first.start.keys() != start.keys():
        yield f"the names of weights differ: {sorted(first.start.keys() ^ start.keys())}"
        return
    yield from (f"weight {name} is not bit by bit what it should start from: {_apart(first.start[name], value)}"
                for name, value in start.items() if not torch.equal(first.start[name], value))
    for step, (loss, expected) in enumerate(zip(first.losses, wanted.losses, strict=True)):
        if not math.isclose(loss, expected, rel_tol=tolerance.loss):
            yield f"loss of step {step + 1}: {loss:.8g}, plain PyTorch has {expected:.8g}"
    for step, (norm, expected) in enumerate(zip(first.norms, wanted.norms, strict=True)):
        if norm is not None and expected is not None and not math.isclose(norm, expected, rel_tol=tolerance.norm):
            yield f"gradient norm of step {step + 1}: {norm:.8g}, plain PyTorch has {expected:.8g}"
    for name, value in wanted.end.items():
        moved, apart = (value - origin[name]).norm().item(), (first.end[name] - value).norm().item()
        other_signs = 2 * composition.arguments.get("lr", 0.0) * OTHER_SIGNS.get(composition.optimizer, 0)**0.5
        if not apart <= weight_tolerance * moved + other_signs + ROUNDING * value.numel()**0.5:
            yield (f"weight {name} after step {composition.steps}: {_apart(first.end[name], value)}; they are {apart:.3g} "
                   f"apart, and all steps moved it by {moved:.3g}")


def _apart(found: Tensor, wanted: Tensor) -> str:
    apart = (found - wanted).abs()
    at = int(apart.nan_to_num(nan=math.inf).argmax())
    return f"element {at} of {apart.numel()} is {found.flatten()[at]:.8g} and should be {wanted.flatten()[at]:.8g}"
