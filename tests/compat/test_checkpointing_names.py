"""Published activation checkpointing: the same gradients and the same random numbers, wherever the inputs rest."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.compat.deepspeed.runtime.activation_checkpointing import checkpointing


class TensorRanks:
    """An `mpu` whose tensor ranks are all ranks of the job."""

    def get_tensor_model_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    def get_tensor_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank()


def gradients(run: Callable[..., Any]) -> list[Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4))
    value = torch.rand(3, 4, requires_grad=True)
    checkpointing.get_cuda_rng_tracker().reset()
    checkpointing.model_parallel_cuda_manual_seed(3)

    def function(given: Tensor, scale: float) -> Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            noise = torch.rand(4)
        return layers(given) * noise * scale

    result = run(function, value, 2.0)
    drawn = torch.rand(1)
    result.sum().backward()
    assert value.grad is not None
    return [value.grad, result.detach(), drawn, torch.rand(1), *(p.grad for p in layers.parameters() if p.grad is not None)]


@pytest.mark.parametrize("on_host", [False, True])
def test_recompute_is_exact_and_leaves_the_random_state(on_host: bool) -> None:
    checkpointing.configure(None, checkpoint_in_cpu=on_host)
    plain = gradients(operator.call)
    recomputed = gradients(checkpointing.checkpoint)
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))


def partitioned() -> bool:
    checkpointing.configure(TensorRanks(), partition_activations=True, checkpoint_in_cpu=True)
    plain = gradients(operator.call)
    recomputed = gradients(checkpointing.checkpoint)
    return all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))


def test_inputs_that_tensor_ranks_partition_come_back_exactly() -> None:
    from shoal.testing import run_ranks

    assert run_ranks(2, partitioned) == [True, True]


def test_options_can_be_read_as_the_published_variables() -> None:
    def options() -> list[Any]:
        names = ("PARTITION_ACTIVATIONS", "CPU_CHECKPOINT", "SYNCHRONIZE", "num_layers", "mp_rank", "mp_size")
        return [getattr(checkpointing, name) for name in names]

    checkpointing.configure(None, deepspeed_config={"train_batch_size": 1, "activation_checkpointing": {
        "partition_activations": True, "cpu_checkpointing": True, "number_checkpoints": 7}}, checkpoint_in_cpu=False)
    assert checkpointing.is_configured() and options() == [True, False, False, 7, 0, 1]
    checkpointing.configure(None)
    assert options() == [False, False, False, None, 0, 1]


def test_published_helpers_take_arguments_apart() -> None:
    given = (torch.ones(4, 4, requires_grad=True), 2, torch.zeros(3, dtype=torch.long), None)
    apart = checkpointing.extract_tensors(given)
    assert apart[1:] == ((2, None), (True, False, True, False)) and checkpointing.merge_tensors(*apart) == given
    first, *_ = checkpointing.detach_variable(given)
    assert first.is_leaf and first.requires_grad and first is not given[0]
    assert [checkpointing.is_activation_to_checkpoint(each) for each in given] == [True, False, False, False]
    assert (checkpointing.get_partition_size(given[0]), checkpointing.get_partition_start(given[0])) == (16, 0)
    found: list[Any] = []
    assert checkpointing.CheckpointFunction.apply(torch.exp, found, given[0]) is found[0]


@pytest.mark.parametrize("given", [{"contiguous_checkpointing": True},
                                   {"contiguous_checkpointing": True, "partition_activations": True}])
def test_contiguous_checkpoints_need_what_they_published(given: dict[str, bool]) -> None:
    with pytest.raises(AssertionError, match="needs"):
        checkpointing.configure(None, **given)


def test_the_tracker_refuses_a_second_state_of_a_name_or_a_seed() -> None:
    tracker = checkpointing.CudaRNGStatesTracker()
    tracker.add("a", 1)
    for name, seed in (("a", 2), ("b", 1)):
        with pytest.raises(Exception, match="give another"):
            tracker.add(name, seed)
    with pytest.raises(Exception, match="tracker"), tracker.fork("c"):
        pass


def test_an_unknown_key_of_the_block_warns_and_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="shoal"):
        checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {
            "partition_activation_": True, "recompute": "full", "cpu_checkpointing": False}})
    assert checkpointing.is_configured() and checkpointing.PARTITION_ACTIVATIONS is False
    unknown = [each.message for each in caplog.records if "unknown key" in each.message]
    assert unknown == ["activation_checkpointing.partition_activation_: unknown key, which has no effect; did you mean "
                       "'partition_activations'?"]
    checkpointing.configure(None)
