"""A released parameter is the same object with the same shape; its data is served, or refused with the fix."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.engine.engine import Engine
from shoal.errors import ReleasedError
from shoal.testing import run_ranks

from .models import FEATURES, Plain, batch, loss_of


def engine_of(model: nn.Module, stage: int = 3, **extra: Any) -> Engine:
    return shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "timeout": 20,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **extra})[0]


def identity() -> None:
    model = Plain()
    before = {name: (p, p.shape, p.dtype) for name, p in model.named_parameters()}
    engine = engine_of(model)
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert (p.shape, p.dtype) == before[name][1:]
        assert isinstance(p, nn.Parameter)
        assert p.numel() == p.shape.numel()
        assert p.is_leaf
        assert p.requires_grad
        assert p.grad is None
        assert p.device == engine.device
        assert p in set(model.parameters())
        assert "released" in repr(p)
    assert sum(p.numel() for p in model.parameters()) == sum(shape.numel() for _, shape, _ in before.values())


def converted_to_itself() -> None:
    model = Plain()
    engine = engine_of(model)
    before = dict(model.named_parameters())
    assert model.to(engine.device) is model.to(dtype=torch.float32) is model.float() is model
    assert all(p is before[name] and "released" in repr(p) for name, p in model.named_parameters())
    for cast in (model.half, lambda: model.to(torch.bfloat16), lambda: model.to("meta")):
        with pytest.raises(ReleasedError, match="read the data of parameter"):
            cast()


def test_a_conversion_that_changes_nothing_reads_no_released_data() -> None:
    run_ranks(2, converted_to_itself)


def refused() -> None:
    model = Plain()
    engine_of(model)
    weight = model.blocks[0].up.weight
    wanted = (rf"rank {dist.get_rank()}: '\w+' read the data of parameter 'blocks\.0\.up\.weight' \(25, 12\), which is "
              rf"sharded over 2 ranks(.|\n)*shoal\.gathered")
    detached = weight.detach()
    for read in (lambda: weight + 1, weight.sum, lambda: torch.cat([weight, weight]), lambda: nn.init.zeros_(weight),
                 lambda: copy.deepcopy(weight), weight.numpy, weight.tolist, weight.untyped_storage,
                 lambda: bool(weight.isnan().any()), lambda: detached[0], detached.clone,
                 detached.tolist, detached.numpy, detached.data_ptr, lambda: weight.data.zero_(),
                 lambda: detached.requires_grad_(), lambda: torch.save(detached, io.BytesIO()),
                 lambda: copy.deepcopy(detached)):
        with pytest.raises(ReleasedError, match=wanted):
            read()


def named_without_values() -> None:
    model = Plain()
    plain = {name: (value.shape, value.dtype, value.device, value.stride()) for name, value in model.state_dict().items()}
    engine_of(model)
    state = model.state_dict()
    assert {name: (value.shape, value.dtype, value.device, value.stride()) for name, value in state.items()} == plain
    weight, detached = model.blocks[0].up.weight, state["blocks.0.up.weight"]
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)
    assert detached.untyped_storage().nbytes() == detached.nbytes
    with pytest.raises(ReleasedError, match=r"'tolist' read the data of parameter 'blocks\.0\.up\.weight'"):
        detached.untyped_storage().tolist()
    assert not detached.requires_grad and detached.numel() == weight.numel() and len(detached) == len(weight)
    assert "shape=(25, 12)" in repr(detached) and torch.zeros_like(detached).shape == detached.detach().shape
    assert weight.new_ones(2).tolist() == [1, 1] and not torch.zeros_like(weight).any()
    with shoal.gathered(model, modifier_rank=0):
        assert torch.equal(detached, weight), "its values are those that the parameter holds at present"
        detached.fill_(7)
    with shoal.gathered(model):
        assert (weight == 7).all() and (detached.double() == 7).all()


def gathering() -> None:
    model = Plain()
    torch.manual_seed(0)
    engine = engine_of(model)
    weight = model.blocks[0].up.weight
    with shoal.gathered([weight, None]), shoal.zero.GatheredParameters(None):
        original = weight.detach().clone()
        assert type(weight) is nn.Parameter
        with shoal.gathered(model):  # nests
            assert torch.equal(model.blocks[0].up.weight, original)
        with torch.no_grad():
            weight.zero_()
    with shoal.gathered(weight):
        assert torch.equal(weight, original), "what was written without modifier_rank is dropped"
    with shoal.zero.GatheredParameters([weight], modifier_rank=1), torch.no_grad():
        weight.fill_(float(dist.get_rank() + 1))
    with shoal.gathered(weight):
        assert (weight == 2).all(), "what rank 1 wrote counts"
    tokens, targets = batch(0, 0, dist.get_rank())
    engine.backward(loss_of(engine(tokens), targets))
    engine.step()
    with shoal.gathered(weight):
        assert (weight - 2).abs().max() < 0.5, "the master took over what was written"
        assert not (weight == 2).all()
    with pytest.raises(KeyError), shoal.gathered(weight):
        raise KeyError
    with pytest.raises(ReleasedError):
        weight.sum()


def masters(stage: int) -> None:
    model = Plain()
    engine = engine_of(model, stage, bf16={"enabled": True})
    with shoal.gathered(model, modifier_rank=0), torch.no_grad():
        model.head.bias.fill_(3.0 if dist.get_rank() == 0 else 5.0)
    tokens, targets = batch(0, 0, dist.get_rank())
    engine.backward(loss_of(engine(tokens), targets))
    engine.step()
    with shoal.gathered(model):
        assert (model.head.bias.float() - 3).abs().max() < 0.5


def after_step(stage: int) -> None:
    """A read right after step waits for what is under way."""
    model = Plain()
    engine = engine_of(model, stage)
    tokens, targets = batch(0, 0, dist.get_rank())
    for _ in range(3):
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        digest = torch.stack([tensor.double().sum() for tensor in state.values()])
        other = digest.clone()
        dist.broadcast(other, 0)
        assert torch.equal(digest, other)


def destroyed(stage: int) -> None:
    torch.manual_seed(0)
    model = Plain()
    engine = engine_of(model, stage)
    tokens, _ = batch(0, 0, 0)
    with torch.no_grad():
        expected = engine(tokens)
    engine.destroy()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert torch.equal(model(tokens), expected)
    model(tokens).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def evaluation() -> None:
    model = Plain()
    engine = engine_of(model)
    tokens, targets = batch(0, 0, 0)
    engine.eval()
    with torch.no_grad():
        first = engine(tokens)
        assert torch.equal(engine(tokens), first)
    assert all("released" in repr(p) for p in model.blocks.parameters())
    engine.train()
    engine.backward(loss_of(engine(tokens), targets))
    engine.step()
    assert all("released" in repr(p) for p in model.blocks[1:].parameters())


def recovered() -> None:
    """A forward that raises leaves an engine that works."""
    model = FEATURES["plain"]()
    engine = engine_of(model)
    tokens, targets = batch(0, 0, dist.get_rank())
    with pytest.raises(IndexError):
        engine(tokens + 1000)
    engine.backward(loss_of(engine(tokens), targets))
    engine.step()
    assert engine.was_step_applied()


def test_a_released_parameter_keeps_identity_shape_and_dtype() -> None:
    run_ranks(2, identity)


def test_reading_a_released_parameter_names_it_and_the_fix() -> None:
    run_ranks(2, refused)


def test_a_state_dict_names_released_parameters_without_their_values() -> None:
    run_ranks(2, named_without_values)


def test_gathering_contexts_give_full_values_and_keep_the_modifiers_writes() -> None:
    run_ranks(2, gathering)


@pytest.mark.parametrize("stage", range(4))
def test_writes_into_16_bit_weights_reach_the_masters(stage: int) -> None:
    run_ranks(2, masters, stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_reading_weights_after_a_step_waits_for_them(stage: int) -> None:
    run_ranks(2, after_step, stage)


@pytest.mark.parametrize("stage", range(4))
def test_destroying_an_engine_leaves_a_plain_model(stage: int) -> None:
    run_ranks(2, destroyed, stage)


def test_evaluation_releases_what_it_gathered() -> None:
    run_ranks(2, evaluation)


def test_a_forward_that_raised_leaves_a_working_engine() -> None:
    run_ranks(2, recovered)
