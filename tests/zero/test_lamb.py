"""LAMB on slices is LAMB on whole parameters: at every stage, on any ranks, wherever the state rests, and when resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import ConfigError, OptimizerError, UsageError
from shoal.optim import Lamb
from shoal.testing import run_ranks
from shoal.tier import store as stores

from .models import FEATURES, batch, loss_of
from .test_tiers import APART, TIERS
from .trained import build, precision

SAMPLES, MICRO, STEPS = 12, 2, 3
LAMB = {"lr": 2e-2, "weight_decay": 0.1, "max_coeff": 0.9, "min_coeff": 0.05}
BITING = {**LAMB, "max_coeff": 0.4, "min_coeff": 0.25}


@dataclass
class Result:
    losses: list[float]
    weights: dict[str, Tensor]
    coefficients: dict[str, float]
    cut: list[str]
    """Of the parameters that a rank holds only a part of."""


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 1e-2}]


def engine_of(feature: str, stage: int, params: dict[str, Any] = LAMB, *, optimizer: Any = None,
              **more: Any) -> shoal.Engine:
    """Return an engine that steps by LAMB, by name unless a function makes the optimizer."""
    zero = {"stage": stage, **more.pop("zero_optimization", {})}
    named = {} if optimizer else {"optimizer": {"type": "Lamb", "params": params}}
    config = {"train_batch_size": SAMPLES, "train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": 0.5,
              "zero_optimization": zero, "timeout": 20, **named, **more}
    model = build(feature)
    return shoal.initialize(model=model, optimizer=optimizer, model_parameters=groups(model), config=config)[0]


def train(engine: shoal.Engine, first: int = 0) -> Result:
    """Train on the same samples on any number of ranks."""
    losses: list[float] = []
    for step in range(first, first + STEPS):
        for micro in range(engine.gradient_accumulation_steps()):
            number = micro * engine.world_size + engine.global_rank
            if isinstance(engine.module, FEATURES["sometimes"]):
                engine.module.calls = step
            tokens, targets = batch(step, 0, number)
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert engine.optimizer is not None and engine.sharded is not None
    cut = [slot.name for unit in engine.sharded.trainable for slot in unit.layout.slots
           if slot.start < unit.shard_range.stop < slot.stop]
    with shoal.gathered(engine.module):
        weights = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
    assert engine.optimizer.get_lamb_coeffs() == list(engine.optimizer.coefficients.values())
    return Result(losses, weights, dict(engine.optimizer.coefficients), cut)


def plain(feature: str, params: dict[str, Any] = LAMB) -> Result:
    """Train in one process, by torch alone and `Lamb.step` on whole parameters."""
    model = build(feature)
    optimizer = Lamb(groups(model), **params)
    names = {p: name for name, p in model.named_parameters()}
    losses: list[float] = []
    stepped: list[str] = []
    for step in range(STEPS):
        for number in range(SAMPLES // MICRO):
            if isinstance(model, FEATURES["sometimes"]):
                model.calls = step
            tokens, targets = batch(step, 0, number)
            loss = loss_of(model(tokens), targets)
            (loss / (SAMPLES // MICRO)).backward()
            losses.append(loss.item())
        stepped = [names[p] for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    coefficients = dict(zip(stepped, optimizer.lamb_coeffs, strict=True))
    return Result(losses, {name: p.detach() for name, p in model.named_parameters()}, coefficients, [])


def agree(found: Result, expected: Result, case: object) -> None:
    assert found.coefficients == pytest.approx(expected.coefficients, rel=1e-4), case
    for name, weight in expected.weights.items():
        assert torch.allclose(found.weights[name], weight, rtol=1e-5, atol=1e-5), (case, name)


def alike(found: Result, expected: Result, case: object) -> None:
    assert found.losses == expected.losses and found.coefficients == expected.coefficients, case
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items()), case


CASES: list[tuple[str, dict[str, Any]]] = [
    ("plain", LAMB), ("plain", BITING), ("tied", LAMB), ("unused", LAMB), ("sometimes", LAMB), ("frozen", LAMB),
]


def every(cases: list[tuple[str, dict[str, Any]]], optimizer: Callable[[Any], Lamb] | None = None) -> list[list[Result]]:
    return [[train(engine_of(feature, stage, params, optimizer=optimizer)) for stage in range(4)]
            for feature, params in cases]


def test_every_stage_on_any_ranks_steps_as_whole_parameters_do() -> None:
    expected = [plain(feature, params) for feature, params in CASES]
    assert {0.4, 0.25} <= set(expected[1].coefficients.values()), "the bounds bite"
    assert {0.4, 0.25}.isdisjoint(expected[0].coefficients.values())
    for ranks, part in ((1, slice(1, 2)), (2, slice(0, None)), (3, slice(1, 5, 3))):
        for case, found, one in zip(CASES[part], run_ranks(ranks, every, CASES[part])[0], expected[part], strict=True):
            for stage, result in enumerate(found):
                assert bool(result.cut) == (ranks > 1), "ranks cut parameters"
                agree(result, one, (ranks, stage, case))
            alike(found[1], found[0], (ranks, case))
            alike(found[3], found[2], (ranks, case))


def by_hand(parameters: Any) -> Lamb:
    return Lamb(parameters, **LAMB)


def test_an_optimizer_of_the_users_steps_by_torch() -> None:
    cases = [("tied", LAMB), ("sometimes", LAMB)]
    for case, found in zip(cases, run_ranks(2, every, cases, by_hand)[0], strict=True):
        for stage, result in enumerate(found):
            agree(result, plain(*case), (stage, case))


def zeros() -> dict[str, float]:
    engine = engine_of("plain", 2)
    assert engine.optimizer is not None
    for micro in range(engine.gradient_accumulation_steps()):
        tokens, targets = batch(0, micro, engine.global_rank)
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
    return {name: coefficient for name, coefficient in engine.optimizer.coefficients.items() if "norm.bias" in name}


def test_a_parameter_of_zeros_steps_with_coefficient_one_beyond_the_bounds() -> None:
    assert list(run_ranks(2, zeros)[0].values()) == [1.0] * 3


# Tiers


def on_tiers(stage: int, folder: str, dtype: str, optimizer: Callable[[Any], Lamb] | None) -> list[tuple[str, Result]]:
    found: list[tuple[str, Result]] = []
    for host, tiers in ((torch.device("cpu"), TIERS), (torch.device("cpu", 0), APART)):  # torch takes them for two
        stores.HOST = host
        for name, tier in tiers.items():
            placed = {key: {**block, "nvme_path": folder} for key, block in tier.items()}
            engine = engine_of("sometimes", stage, optimizer=optimizer, **precision(dtype),
                               zero_optimization={"sub_group_size": 700, **placed})
            found.append((name, train(engine)))
            engine.destroy()
    stores.HOST = torch.device("cpu")
    return found


@pytest.mark.parametrize(("stage", "dtype", "optimizer"), [
    (0, "fp32", by_hand), (1, "fp16", None), (2, "bf16", None), (3, "bf16", by_hand), (3, "fp32", None)])
def test_every_tier_steps_as_without_tiers(stage: int, dtype: str, optimizer: Any, tmp_path: Path) -> None:
    (_, first), *others = run_ranks(2, on_tiers, stage, str(tmp_path), dtype, optimizer)[0]
    for name, result in others:
        alike(result, first, name)
    assert list(tmp_path.iterdir()) == [], "swap files are left"


def moved(folder: str) -> tuple[float, float]:
    """Return the bytes read and written in an iteration, per element."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))
    place = {"device": "nvme", "nvme_path": folder, "buffer_count": 2}
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "timeout": 20,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}})[0]
    assert engine.sharded is not None and engine.optimizer is not None
    swap = engine.sharded.storage.swaps[0]

    def rest() -> tuple[int, int]:
        assert engine.optimizer is not None
        engine.optimizer.finish_deferred_steps()
        while swap.writing_bytes:
            pass
        return swap.read_bytes, swap.written_bytes

    found: list[tuple[int, int]] = []
    for _ in range(5):  # weights that a step has left for the next forward are written in it
        engine.backward(engine(torch.randn(2, 256)).pow(2).mean())
        engine.step()
        found.append(rest())
    elements = sum(unit.layout.size for unit in engine.sharded.units)
    engine.destroy()
    return (found[-1][0] - found[0][0]) / 4 / elements, (found[-1][1] - found[0][1]) / 4 / elements


def test_a_step_on_disk_writes_moments_once_and_weights_once(tmp_path: Path) -> None:
    read, written = run_ranks(1, moved, str(tmp_path))[0]
    assert abs(written - 16) <= 1, "the gradient by backward, moments by the first sweep, weights by the second"
    assert read <= 36, "an iteration by AdamW reads at most 24; the second sweep master and moments once more"


# Checkpoints


def save(folder: str, stage: int) -> Result:
    engine = engine_of("unused", stage)
    train(engine)
    engine.save_checkpoint(folder)
    rest = train(engine, STEPS)
    engine.wait_for_checkpoint()
    return rest


def load(folder: str, stage: int) -> Result:
    engine = engine_of("unused", stage)
    engine.load_checkpoint(folder)
    return train(engine, STEPS)


def test_a_resumed_run_has_the_same_bits_and_others_differ_by_rounding(tmp_path: Path) -> None:
    rest = run_ranks(2, save, str(tmp_path), 3)[0]
    alike(run_ranks(2, load, str(tmp_path), 3)[0], rest, "the same ranks")
    for ranks, stage in ((1, 0), (3, 1)):
        agree(run_ranks(ranks, load, str(tmp_path), stage)[0], rest, (ranks, stage))


# Steps that are not taken, and what is refused


def overflowing() -> None:
    engine = engine_of("plain", 2, train_batch_size=4, fp16={"enabled": True, "initial_scale_power": 4})
    assert engine.optimizer is not None
    before = {name: weight.clone() for name, weight in (engine.consolidated_state_dict() or {}).items()}
    for weight, applied in ((float("inf"), False), (1.0, True)):
        tokens, targets = batch(0, 0, engine.global_rank)
        engine.backward(loss_of(engine(tokens), targets) * weight)
        engine.step()
        assert engine.was_step_applied() == applied
        assert bool(engine.optimizer.state) == bool(engine.optimizer.coefficients) == applied, "moments are as they were"
        after = engine.consolidated_state_dict() or {}
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items()) == (not applied or not before)


def test_a_step_that_overflows_changes_no_moment() -> None:
    run_ranks(2, overflowing)


def refused() -> None:
    for optimizer in (None, by_hand, Lamb(build("plain").parameters())):
        with pytest.raises(ConfigError, match=r"step_in_backward: got true beside Lamb, .* set it to false"):
            engine_of("plain", 1, optimizer=optimizer, gradient_clipping=0.0,
                      zero_optimization={"offload_optimizer": {"step_in_backward": True}})
    engine = engine_of("plain", 1)
    assert engine.basic_optimizer is not None
    engine.basic_optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(OptimizerError, match="Lamb has a step hook"):
        train(engine)
    other = engine_of("plain", 1, optimizer=lambda parameters: torch.optim.AdamW(parameters))
    assert other.optimizer is not None
    with pytest.raises(UsageError, match="coefficients: the optimizer is AdamW, which has no trust ratios"):
        other.optimizer.get_lamb_coeffs()


def test_steps_in_backward_and_step_hooks_are_refused_for_lamb() -> None:
    run_ranks(1, refused)
