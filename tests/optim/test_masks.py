"""Elements outside the mask have no momentum after the warm-up, although compression gives them a sign."""

from __future__ import annotations

import logging
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shoal
from shoal.errors import ConfigError
from shoal.optim.compressed import CompressedOptimizer
from shoal.optim.masks import boxes
from shoal.optim.onebit import OneBitAdam, ZeroOneAdam
from shoal.optim.onebit_lamb import OneBitLamb
from shoal.testing import run_ranks

from .compressed_runs import FREEZE, WARM, batch, engine_of, model, train, weights

REACHED = 11
"""Rows of the first weight that have gradients."""


def groups(whole: nn.Module, mask: Tensor | None) -> list[dict[str, Any]]:
    first, *others = whole.parameters()
    return [{"params": [first], **({} if mask is None else {"exp_avg_mask": mask})}, {"params": others}]


def trained(kind: str, masked: bool, stage: int, folder: str) -> tuple[float, float]:
    """Train with gradients of the first rows only; return the largest change of the other rows, and of these."""
    whole, mask = model(), torch.zeros(40, 1)
    mask[:REACHED] = 1
    start = next(whole.parameters()).detach().clone()
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5, "zero_optimization": {"stage": stage},
              "optimizer": {"type": kind, "params": {"lr": 1e-2, **WARM[kind]}}}
    engine = shoal.initialize(model=whole, model_parameters=groups(whole, mask if masked else None), config=config)[0]
    for step in range(16):
        if step == 9:
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
            engine.load_checkpoint(folder)
        x, y = batch(step, engine.global_rank)
        reached = torch.cat([engine.module[0].weight[:REACHED], start[REACHED:]])
        hidden = nn.functional.linear(x, reached, engine.module[0].bias)
        loss = nn.functional.mse_loss(engine.module[3](engine.module[2](hidden.tanh())), y) + 0 * engine(x).sum()
        engine.backward(loss)
        engine.step()
    moved = torch.zeros(start.numel())
    for unit in engine.sharded.units if engine.sharded is not None else ():
        for part in unit.layout.parts(unit.master_range):
            if unit.layout.slots[part.slot].name == "0.weight" and unit.master is not None:
                length = part.stop - part.start
                here = unit.master[part.offset:part.offset + length] - start.flatten()[part.start:part.stop]
                moved[part.start:part.stop] = here.abs()
    return moved.view_as(start)[REACHED:].max().item(), moved.view_as(start)[:REACHED].max().item()


@pytest.mark.parametrize("kind", WARM)
def test_masked_out_elements_do_not_move(kind: str, tmp_path: Any) -> None:
    for stage in (0, 2):
        found = run_ranks(2, trained, kind, True, stage, str(tmp_path / f"{stage}"))
        assert max(out for out, _ in found) == 0 and max(kept for _, kept in found) > 1e-3
    found = run_ranks(2, trained, kind, False, 1, str(tmp_path / "without"))
    assert max(out for out, _ in found) > 0, "without a mask, compression moves every element"


def masters(engine: shoal.Engine, name: str) -> Tensor:
    """Return this rank's slice of the master of a parameter, flat, with NaN elsewhere."""
    assert engine.sharded is not None
    found = torch.full((engine.module.get_parameter(name).numel(),), torch.nan)
    for unit in engine.sharded.units:
        for part in unit.layout.parts(unit.master_range):
            if unit.layout.slots[part.slot].name == name and unit.master is not None:
                found[part.start:part.stop] = unit.master[part.offset:part.offset + part.stop - part.start]
    return found


def resumed(kind: str, decay: float, folder: str) -> tuple[float, float, float]:
    """Resume after the warm-up with a mask that the first run did not have.

    Return the largest difference of masked-out masters from weight decay alone, that of the others, and the largest change
    before.
    """
    mask = torch.zeros(40, 1)
    mask[:REACHED] = 1
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2},
              "optimizer": {"type": kind, "params": {"lr": 1e-2, "weight_decay": decay, **WARM[kind]}}}
    before = shoal.initialize(model=(whole := model()), model_parameters=groups(whole, None), config=config)[0]
    start = masters(before, "0.weight")
    train(before, range(FREEZE + 2))
    before.save_checkpoint(folder)
    before.wait_for_checkpoint()
    engine = shoal.initialize(model=(whole := model()), model_parameters=groups(whole, mask), config=config)[0]
    engine.load_checkpoint(folder)
    known = masters(engine, "0.weight")
    moved = (known - start).abs().view(40, 40)[REACHED:]
    expected = known.clone()
    for step in range(4):
        train(engine, range(FREEZE + 2 + step, FREEZE + 3 + step))
        assert engine.optimizer is not None
        length = 1e-2 * (engine.optimizer.coefficients.get("0.weight", 1.0) if kind == "OneBitLamb" else 1.0)
        expected.mul_(1 - length * decay)
    off = (masters(engine, "0.weight") - expected).abs().view(40, 40)
    return tuple(each.nan_to_num().max().item() for each in (off[REACHED:], off[:REACHED], moved))


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", WARM)
def test_earlier_momentum_does_not_move_masked_elements_but_decay_does(
        kind: str, decay: float, tmp_path: Any) -> None:
    out, kept, moved = map(max, zip(*run_ranks(2, resumed, kind, decay, str(tmp_path)), strict=True))
    assert out <= (1e-6 if decay else 0) and kept > 1e-3 and moved > 1e-3


def nothing_kept(kind: str) -> tuple[bool, list[float], bool]:
    """Mask all elements out; return whether the warm-up equals one without a mask, the norms of later steps, and whether
    these leave the masters alone.
    """
    config = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": kind, "params": {"lr": 1e-2, **WARM[kind]}}}
    plain, masked = (shoal.initialize(model=(whole := model()), config=config, model_parameters=[
        {"params": list(whole.parameters()), **more}])[0] for more in ({}, {"exp_avg_mask": torch.zeros(())}))
    for engine in (plain, masked):
        train(engine, range(FREEZE))
    alike = torch.equal(weights(plain), weights(masked)) and plain.get_global_grad_norm() == masked.get_global_grad_norm()
    before, norms = masters(masked, "0.weight"), list[float]()
    for step in range(FREEZE, FREEZE + 3):
        train(masked, range(step, step + 1))
        norms += [norm for norm in [masked.get_global_grad_norm()] if norm is not None]
    return alike, norms, torch.equal(before.nan_to_num(), masters(masked, "0.weight").nan_to_num())


@pytest.mark.parametrize("kind", WARM)
def test_a_mask_begins_after_warm_up_and_excludes_elements_from_the_norm(kind: str) -> None:
    for alike, norms, still in run_ranks(2, nothing_kept, kind):
        assert alike and norms == [0, 0, 0] and still


@pytest.mark.parametrize("kind", [OneBitAdam, ZeroOneAdam, OneBitLamb])
def test_a_mask_works_without_an_engine(kind: type[CompressedOptimizer]) -> None:
    mask, gradients = torch.tensor([[1], [0]]), torch.randn(FREEZE + 4, 2, 3, generator=torch.Generator().manual_seed(0))
    found: list[Tensor] = []
    for group in ({}, {"exp_avg_mask": mask}):
        weight = nn.Parameter(torch.ones(2, 3))
        optimizer = kind([{"params": [weight], **group}], lr=0.1, **WARM[kind.__name__])
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
            found.append(weight.detach().clone())
            assert torch.equal(weight.grad, gradient), "the gradient is the caller's"
    plain, masked = found[:len(gradients)], found[len(gradients):]
    assert all(map(torch.equal, plain[:FREEZE], masked[:FREEZE]))
    assert all(torch.equal(weight[1], masked[FREEZE - 1][1]) for weight in masked[FREEZE:])
    assert not torch.equal(masked[-1][0], masked[FREEZE - 1][0]) and not torch.equal(plain[-1][1], plain[FREEZE - 1][1])
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = kind([{"params": [weight], "exp_avg_mask": torch.ones(2)}], **WARM[kind.__name__])
    with pytest.raises(ConfigError, match=rf"{kind.__name__}: exp_avg_mask: got \(2,\) for a parameter of shape \(2, 3\)"):
        for _ in range(FREEZE + 1):
            weight.grad = torch.ones(2, 3)
            optimizer.step()


class Part(nn.Module):
    """Layers whose rows or columns are sliced over two tensor ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.columns = nn.Linear(40, 20, bias=False), nn.Linear(20, 40, bias=False)
        for dim, layer in enumerate((self.rows, self.columns)):
            vars(layer.weight).update(tensor_model_parallel=True, partition_dim=dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.columns(self.rows(x).tanh())[:, :3]


def sliced(mine: bool) -> list[tuple[Tensor, Tensor]]:
    """Train with one mask of the global shape for two parameters, or, if `mine`, with masks of this rank's slices."""
    mask = (torch.arange(1600).view(40, 40) % 7 > 2).float()
    rank = torch.distributed.get_rank() % 2
    halves = (mask[20 * rank:][:20], mask[:, 20 * rank:][:, :20])
    whole = Part()
    given: list[dict[str, Any]] = [{"params": list(whole.parameters()), "exp_avg_mask": mask}]
    if mine:
        given = [{"params": [weight], "exp_avg_mask": half} for weight, half in zip(whole.parameters(), halves, strict=True)]
    engine = shoal.initialize(model=whole, model_parameters=given, config={
        "train_micro_batch_size_per_gpu": 8, "mesh": {"tensor": 2},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, **WARM["OneBitAdam"]}}})[0]
    train(engine, range(FREEZE), rank=engine.mesh.rank("data"))
    before = [masters(engine, name) for name in ("rows.weight", "columns.weight")]
    train(engine, range(FREEZE, FREEZE + 3), rank=engine.mesh.rank("data"))
    after = [masters(engine, name) for name in ("rows.weight", "columns.weight")]
    return [((new - old).nan_to_num(), half.flatten()) for new, old, half in zip(after, before, halves, strict=True)]


@pytest.mark.parametrize("mine", [False, True])
def test_a_mask_covers_the_full_parameter_or_the_part_of_a_tensor_rank(mine: bool) -> None:
    found = [each for rank in run_ranks(4, sliced, mine) for each in rank]
    assert all(moved[mask == 0].abs().max() == 0 for moved, mask in found)
    assert sum(int(moved[mask == 1].count_nonzero()) for moved, mask in found) == 2 * 913, "elements inside the mask move"


def refused() -> list[str]:
    said: list[str] = []
    for mask in (torch.ones(3), 1.0):
        with pytest.raises(ConfigError) as caught:
            shoal.initialize(model=(whole := model()), model_parameters=groups(whole, mask), config={
                "train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 4}}})
        said.append(str(caught.value))
    train(engine := engine_of(), range(FREEZE))
    before = weights(engine)
    assert engine.optimizer is not None
    engine.optimizer.param_groups[0]["exp_avg_mask"] = torch.ones(7)
    with pytest.raises(ConfigError) as caught:
        train(engine, range(FREEZE, FREEZE + 1))
    assert torch.equal(weights(engine), before), "a step that is refused changes nothing"
    return [*said, str(caught.value)]


def test_a_mask_that_does_not_fit_is_refused() -> None:
    wrong, number, later = run_ranks(2, refused)[0]
    assert "optimizer group 0: exp_avg_mask: got (3,) for '0.weight' of shape (40, 40)" in wrong
    assert "got float for '0.weight'" in number
    assert "optimizer group 0: exp_avg_mask: got (7,) for '2.weight' of shape (40,)" in later


def test_a_mask_without_compression_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shoal"):
        shoal.initialize(model=(whole := model()), model_parameters=groups(whole, torch.ones(40, 1)), config={
            "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {}}})
    assert "optimizer group 0: exp_avg_mask has no effect with AdamW, which does not compress" in caplog.text


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    sizes = tuple(draw(st.sampled_from((1, size))) for size in shape)
    start = draw(st.integers(0, prod(shape) - 1))
    return shape, sizes, start, draw(st.integers(start + 1, prod(shape)))


@given(cases())
def test_boxes_equal_the_expanded_mask_and_copy_nothing(case: tuple[tuple[int, ...], tuple[int, ...], int, int]) -> None:
    shape, sizes, start, stop = case
    mask = torch.arange(prod(sizes)).view(sizes)
    found = list(boxes(mask, shape, start, stop))
    whole = torch.cat([box.expand(size).reshape(-1) for size, box in found])
    assert torch.equal(whole, mask.expand(shape).reshape(-1)[start:stop])
    assert all(box.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr() for _, box in found)
    assert len(found) <= max(1, 2 * len(shape) - 1)
