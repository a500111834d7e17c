"""The published functions that read and write the state of a parameter, and the attributes of sharded parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
import shoal.compat.deepspeed as deepspeed
from shoal.compat.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from shoal.compat.parameters import add_attributes
from shoal.errors import NotSupportedYet, ReleasedError
from shoal.testing import run_ranks

LR = 0.1
HOST = {"offload_optimizer": {"device": "cpu"}}
CASES: list[dict[str, Any]] = [
    {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "stage3_param_persistence_threshold": 0},
    {"stage": 1, **HOST}, {"stage": 3, "stage3_param_persistence_threshold": 0, **HOST},
]


def engine_of(zero: dict[str, Any], half: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    return deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "bf16": {"enabled": half}, "zero_optimization": zero,
        "optimizer": {"type": "Adam", "params": {"lr": LR, "eps": 1e-8}}})[0]


def train(engine: Any, *, step: bool = True) -> None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(2, 6, dtype=dtype) * (1 + engine.global_rank)).square().mean())
    if step:
        engine.step()


def full_values(cases: list[dict[str, Any]], half: bool) -> bool:
    """Read and write whole values in every case; assert what each read gives."""
    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    for zero in cases:
        engine = engine_of(zero, half)
        parameters = list(engine.module.parameters())
        torch.manual_seed(0)
        for layer in plain:
            layer.reset_parameters()
        for parameter, wanted in zip(parameters, plain.parameters(), strict=True):
            found = safe_get_full_fp32_param(parameter)
            assert found is not None
            assert found.dtype == torch.float32
            assert torch.equal(found, wanted.detach()), zero
            assert torch.equal(safe_get_full_optimizer_state(parameter, "exp_avg"), torch.zeros_like(found))
        train(engine, step=False)
        check_gradient(engine, parameters, half)
        first = parameters[0]
        safe_set_full_fp32_param(first, torch.full(first.shape, 4.0))
        safe_set_full_optimizer_state(first, torch.zeros(first.shape), "exp_avg_sq")
        safe_set_full_grad(first, torch.full(first.shape, 2.0))
        safe_update_full_grad_vectorized(parameters[:1], lambda gradient, _: -gradient)
        engine.step()
        # Adam's first step is lr in the direction of the gradient, whatever its size
        assert torch.allclose(safe_get_full_fp32_param(first), torch.full(first.shape, 4.0 + LR), atol=1e-5), zero
        assert torch.allclose(safe_get_full_optimizer_state(first, "exp_avg"), torch.full(first.shape, -0.2), atol=1e-6)
        safe_set_full_fp32_param(first, torch.full(first.shape, 0.5))
        with deepspeed.zero.GatheredParameters(parameters):
            assert torch.equal(first.detach().float(), torch.full(first.shape, 0.5))
        train(engine)
        engine.destroy()
    return True


def of_an_engine_of_shoal() -> None:
    model = nn.Linear(4, 4)
    engine = shoal.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"},
                                                   "zero_optimization": {"stage": 2}})[0]
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    safe_set_full_fp32_param(model.weight, torch.full((4, 4), 3.0))
    assert torch.equal(model.weight.detach(), torch.full((4, 4), 3.0))
    assert torch.equal(safe_get_full_fp32_param(model.weight), model.weight.detach())
    assert safe_get_full_optimizer_state(model.weight, "exp_avg").any()
    assert safe_get_full_fp32_param(nn.Parameter(torch.ones(2))) is None


def test_parameters_of_an_engine_that_shoal_has_built_are_found() -> None:
    run_ranks(2, of_an_engine_of_shoal)


def check_gradient(engine: Any, parameters: list[nn.Parameter], half: bool) -> None:
    """Assert that reduced gradients are the mean over ranks of plain ones."""
    with deepspeed.zero.GatheredParameters(parameters):
        copies = [parameter.detach().float().requires_grad_() for parameter in parameters]
    means = [torch.zeros_like(copy) for copy in copies]
    for rank in range(engine.world_size):
        hidden = torch.ones(2, 6) * (1 + rank) @ copies[0].T + copies[1]
        out = hidden @ copies[2].T + copies[3]
        for mean, gradient in zip(means, torch.autograd.grad(out.square().mean(), copies), strict=True):
            mean += gradient / engine.world_size
    for parameter, mean in zip(parameters, means, strict=True):
        found: Tensor = safe_get_full_grad(parameter)
        assert torch.allclose(found, mean, rtol=0.05 if half else 1e-5, atol=0.05 if half else 1e-6)


def test_whole_values_are_read_and_written_on_one_rank() -> None:
    assert run_ranks(1, full_values, CASES, False) == [True]


def test_whole_values_are_read_and_written_on_two_ranks() -> None:
    assert run_ranks(2, full_values, CASES, False) == [True, True]


def test_whole_values_are_read_where_a_rank_has_padding_alone() -> None:
    assert run_ranks(4, full_values, CASES, False) == [True] * 4


def test_16_bit_training_has_whole_values_of_its_fp32_state() -> None:
    assert run_ranks(2, full_values, [CASES[1], CASES[4]], True) == [True, True]


def local_values() -> list[int]:
    """Read and write this rank's slices at stage 3; return their sizes."""
    engine = engine_of({"stage": 3, "stage3_param_persistence_threshold": 0})
    first = next(engine.module.parameters())
    train(engine)
    train(engine, step=False)
    mine = safe_get_local_fp32_param(first)
    assert safe_get_local_grad(first).shape == safe_get_local_optimizer_state(first, "exp_avg").shape == mine.shape
    safe_set_local_fp32_param(first, torch.full_like(mine, 3.0))
    safe_set_local_optimizer_state(first, torch.full_like(mine, 7.0), "exp_avg")
    assert torch.equal(safe_get_full_fp32_param(first), torch.full(first.shape, 3.0))
    assert torch.equal(safe_get_full_optimizer_state(first, "exp_avg"), torch.full(first.shape, 7.0))
    size = mine.numel()
    engine.step()
    engine.destroy()
    return [size]


def test_slices_of_two_ranks_make_up_the_whole() -> None:
    assert sum(size for sizes in run_ranks(2, local_values) for size in sizes) == 30


def gather_and_partition() -> bool:
    """Call the published methods of sharded parameters, with lists and with values that were written."""
    status = deepspeed.zero.ZeroParamStatus
    engine = engine_of({"stage": 3, "stage3_param_persistence_threshold": 0})
    first, _, last, _ = engine.module.parameters()
    assert first.all_gather(param_list=[first, last]) is None
    assert (first.ds_status, last.ds_status) == (status.AVAILABLE, status.AVAILABLE)
    first.data.fill_(2.0)
    assert first.partition(param_list=[first, last], has_been_updated=True) is None
    assert (first.ds_status, last.ds_status) == (status.NOT_AVAILABLE, status.NOT_AVAILABLE)
    assert torch.equal(safe_get_full_fp32_param(first), torch.full(first.shape, 2.0))
    first.all_gather_coalesced([first, last]).wait()
    assert torch.equal(first.detach(), torch.full(first.shape, 2.0))
    last.partition(param_list=[first, last])
    for handle in first.all_gather(async_op=True):
        handle.wait()
    assert first.ds_status is status.AVAILABLE
    first.convert_to_zero_parameters([first, last])
    with pytest.raises(NotSupportedYet, match="safe_get_full_grad"):
        first.partition_gradients([first])
    first.partition()
    train(engine)
    engine.destroy()
    return True


def test_parameters_are_gathered_and_partitioned_by_their_own_methods() -> None:
    assert run_ranks(2, gather_and_partition) == [True, True]


def state_of_stage_0() -> bool:
    """Compare the optimizer that initialize returns with torch's own over the same model."""
    for own in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        plain = torch.optim.AdamW(model.parameters(), lr=LR)
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=plain if own else None, config={
            "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
            **({} if own else {"optimizer": {"type": "AdamW", "params": {"lr": LR}}})})
        assert isinstance(optimizer, torch.optim.AdamW if own else deepspeed.ops.adam.FusedAdam)
        assert not optimizer.state and not engine.optimizer.state
        train(engine)
        parameters = list(model.parameters())
        assert list(optimizer.state) == list(engine.optimizer.state) == optimizer.param_groups[0]["params"] == parameters
        assert all(optimizer.state[each]["exp_avg"].shape == each.shape for each in parameters)
        saved = optimizer.state_dict()
        assert [*saved["state"]] == saved["param_groups"][0]["params"] == [0, 1, 2, 3]
        assert torch.equal(saved["state"][2]["exp_avg"], safe_get_full_optimizer_state(parameters[2], "exp_avg"))
        optimizer.state[parameters[1]]["exp_avg"].fill_(3.0)
        assert torch.equal(safe_get_full_optimizer_state(parameters[1], "exp_avg"), torch.full((5,), 3.0))
        optimizer.load_state_dict(optimizer.state_dict())
        train(engine)
        engine.destroy()
    return True


def test_state_at_stage_0_is_by_the_parameters_of_the_model() -> None:
    assert run_ranks(1, state_of_stage_0) == [True]


def attributes() -> bool:
    zero = deepspeed.zero
    plain = nn.Parameter(torch.zeros(3))
    engine = engine_of({"stage": 3, "stage3_param_persistence_threshold": 0})
    first, bias = list(engine.module.parameters())[:2]
    assert not hasattr(plain, "ds_id")
    assert first.ds_id != bias.ds_id
    assert (first.ds_shape, first.ds_numel) == ((5, 6), 30)
    assert first.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
    with zero.GatheredParameters(first):
        assert first.ds_status is zero.ZeroParamStatus.AVAILABLE
        first.ds_active_sub_modules.clear()
    assert first.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
    assert first.ds_tensor.numel() == 30
    first.all_gather()
    assert first.ds_status is zero.ZeroParamStatus.AVAILABLE
    assert torch.equal(first.detach().flatten(), first.ds_tensor)
    first.partition()
    assert first.ds_status is zero.ZeroParamStatus.NOT_AVAILABLE
    engine.destroy()
    assert not hasattr(first, "ds_id")
    small = engine_of({"stage": 3})
    parameter = next(small.module.parameters())
    assert parameter.ds_persist
    assert parameter.detach().shape == (5, 6)
    small.destroy()
    other = engine_of({"stage": 2})
    assert not hasattr(next(other.module.parameters()), "ds_id")
    with pytest.raises(AssertionError, match="not sharded"):
        safe_get_local_fp32_param(next(other.module.parameters()))
    with pytest.raises(ValueError, match="no gradient now"):
        safe_get_full_grad(next(other.module.parameters()))
    with pytest.raises(ValueError, match="keeps no 'momentum'"):
        safe_get_full_optimizer_state(next(other.module.parameters()), "momentum")
    other.destroy()
    with zero.Init():
        built = nn.Linear(4, 2)
    assert built.weight.ds_numel == 8
    return True


def test_zero_grad_of_a_model_in_a_later_engine_for_inference() -> None:
    engine = engine_of({"stage": 3})
    train(engine)
    model = engine.module
    deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}})
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def moved_model() -> list[str]:
    """Move a model that zero.Init holds, and one that an engine of stage 3 holds, and train on; return the refusals.

    torch takes a host device with an index for another one: it copies.
    """
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    with deepspeed.zero.Init():
        built = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    assert built.to("cpu:1", torch.float32).cpu() is built
    engine = engine_of(zero)
    train(engine)
    before = engine._zero3_consolidated_16bit_state_dict()
    parameters = list(engine.module.parameters())
    engine.module.to(device="cpu:1", dtype=torch.float32)
    assert all(old is new for old, new in zip(parameters, engine.module.parameters(), strict=True))
    after = engine._zero3_consolidated_16bit_state_dict()
    assert before is None or all(torch.equal(before[name], after[name]) for name in before)
    train(engine)
    return [refusal(change) for change in (
        lambda: built.to(torch.bfloat16), lambda: engine.module.to(torch.bfloat16), lambda: engine.module.to("meta"),
        lambda: engine.module._apply(lambda tensor: tensor * 2), engine.module.share_memory)]


def refusal(change: Callable[[], object]) -> str:
    with pytest.raises(ReleasedError) as caught:
        change()
    return str(caught.value).split(": ", 1)[1].split(" (")[0]


def test_a_released_parameter_stays_as_it_is_where_its_model_moves() -> None:
    for refused in run_ranks(2, moved_model):
        assert refused == ["'to' read the data of parameter 'a parameter", *(
            f"'{name}' read the data of parameter '0.weight'" for name in ("to", "to", "mul", "share_memory_"))]


def _moved_within_accumulation(zero: dict[str, Any]) -> bool:
    """Move a model where no step has ended its gradients, and then step; compare with one that stays."""
    engines = [engine_of(zero), engine_of(zero)]
    for engine in engines:
        engine.set_gradient_accumulation_boundary(False)
        train(engine)
        if engine is engines[0]:
            engine.module.cpu()
        engine.set_gradient_accumulation_boundary(True)
        train(engine)
    moved, stayed = (engine.consolidated_state_dict() for engine in engines)
    return moved is None or all(torch.equal(moved[name], stayed[name]) for name in stayed)


@pytest.mark.parametrize("zero", CASES, ids=str)
def test_a_model_moves_while_gradients_wait_for_a_step(zero: dict[str, Any]) -> None:
    assert run_ranks(2, _moved_within_accumulation, zero) == [True] * 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_moves_under_the_published_name() -> None:
    add_attributes()
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert nn.Sequential(scripted).to(torch.float64)[0].weight.dtype == torch.float64


def test_sharded_parameters_alone_have_the_published_attributes() -> None:
    assert run_ranks(1, attributes) == [True]


def loaded_modules() -> None:
    """Load a copy of a module that zero.Init holds, as PEFT loads `modules_to_save`, and the module of an engine."""
    state = {name: torch.full_like(value, 0.5 + dist.get_rank()) for name, value in nn.Linear(6, 5).state_dict().items()}
    with deepspeed.zero.Init():
        built = nn.Linear(6, 5)
    copied = copy.deepcopy(built)
    found = copied.load_state_dict({"weight": state["weight"]}, strict=False)
    assert found.missing_keys == ["bias"]
    with deepspeed.zero.GatheredParameters([copied.weight, built.weight]):
        assert copied.weight.eq(0.5).all()
        assert not built.weight.eq(0.5).any()
    engine = engine_of({"stage": 3, "stage3_param_persistence_threshold": 0})
    train(engine)
    state = {name: torch.full(value.shape, 0.5) for name, value in engine.module.state_dict().items()}
    engine.module.load_state_dict(state)
    assert all(safe_get_full_fp32_param(parameter).eq(0.5).all() for parameter in engine.module.parameters())
    train(engine)


def test_released_parameters_are_loaded_on_every_rank() -> None:
    run_ranks(2, loaded_modules)
