"""`shoal.checkpointing`: recomputed functions are exact, and inputs that rest elsewhere leave the device."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import shoal
from shoal import checkpointing
from shoal.device import current_device
from shoal.errors import ConfigError, UsageError
from shoal.testing import RankFailed, ranks_on, run_ranks
from tests.late.ranks import prepare

LAYERS = 4


def options(choice: str) -> dict[str, Any]:
    mesh = shoal.Mesh(tensor=torch.distributed.get_world_size())
    return {"keep": {}, "host": {"checkpoint_in_cpu": True}, "slice": {"partition_activations": True},
            "slice on the host": {"partition_activations": True, "checkpoint_in_cpu": True},
            "contiguous": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": LAYERS},
            }[choice] | {"mpu": mesh}


def passes(choice: str | None) -> tuple[list[Tensor], list[bool]]:
    """Return gradients and random numbers of two steps, and of each function whether its input's memory was freed."""
    torch.manual_seed(0)
    device = current_device()
    layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()) for _ in range(LAYERS)).to(device)
    checkpointing.configure(**options(choice or "keep"))
    checkpointing.model_parallel_cuda_manual_seed(3 - torch.distributed.get_rank())  # the named state is one, so that ranks
    torch.manual_seed(3)                                                             # have inputs alike
    found: list[Tensor] = []

    def call(layer: nn.Module, hidden: Tensor, scale: float) -> Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            noise = torch.rand(8, device=device)
        return layer(hidden) * noise * scale

    freed: list[bool] = []
    for _ in range(2):
        value = torch.rand(3, 8, device=device, requires_grad=True)
        hidden, memory = value * 1.0, []
        for layer in layers:
            memory.append(StorageWeakRef(hidden.untyped_storage()))
            hidden = call(layer, hidden, 2.0) if choice is None else checkpointing.checkpoint(call, layer, hidden, 2.0)
        freed = [each.expired() for each in memory]
        hidden.sum().backward()
        assert value.grad is not None
        found += [value.grad, *(each.grad for each in layers.parameters() if each.grad is not None), torch.rand(1)]
    checkpointing.configure()
    return [each.detach().cpu() for each in found], freed


@pytest.mark.parametrize("choice", ["keep", "slice", "slice on the host", "contiguous"])
def test_recompute_is_exact_and_slices_free_the_inputs(choice: str) -> None:
    for (plain, _), (found, freed) in zip(run_ranks(2, passes, None), run_ranks(2, passes, choice), strict=True):
        assert len(found) == len(plain) == 2 * (2 + 2 * LAYERS) and all(map(torch.equal, found, plain))
        assert freed == [choice != "keep"] * LAYERS


@pytest.mark.parametrize(("ranks", "choice"), [(1, "host"), (2, "slice on the host")])
def test_inputs_that_rest_on_the_host_leave_the_device(ranks: int, choice: str) -> None:
    with ranks_on(prepare):
        (plain, _), (found, freed) = run_ranks(1, passes, None)[0], run_ranks(ranks, passes, choice)[0]
    assert all(map(torch.equal, found, plain)) and freed == [True] * LAYERS


def apart(reversed_inputs: bool) -> None:
    """Give the second function of the first pass other inputs on each rank: other values, or the same reversed."""
    checkpointing.configure(shoal.Mesh(tensor=2), partition_activations=True)
    hidden = checkpointing.checkpoint(torch.mul, torch.arange(8.0, device=current_device(), requires_grad=True), 2.0)
    if torch.distributed.get_rank() == 1:
        hidden = hidden.flip(0) if reversed_inputs else hidden + 1
    checkpointing.checkpoint(torch.mul, hidden, 2.0)


@pytest.mark.parametrize("reversed_inputs", [False, True])
def test_inputs_that_differ_between_tensor_ranks_are_refused(reversed_inputs: bool) -> None:
    with pytest.raises(RankFailed, match="give different inputs to a mul"):
        run_ranks(2, apart, reversed_inputs)


def trained(recompute: bool) -> list[Tensor]:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS))

        def forward(self, hidden: Tensor) -> Tensor:
            for layer in self.layers:
                hidden = checkpointing.checkpoint(layer, hidden) if recompute else layer(hidden)
            return hidden.square().mean()

    engine: Any = shoal.initialize(model=Model(), config={
        "train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}, "mesh": {"tensor": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}})[0]
    for step in range(2):
        engine.backward(engine(torch.randn(3, 8, generator=torch.Generator().manual_seed(step))))
        engine.step()
    with shoal.gathered(engine.module):
        return [each.detach().clone() for each in engine.module.parameters()]


def test_recomputed_functions_train_at_stage_3_as_without() -> None:
    for plain, found in zip(run_ranks(2, trained, False), run_ranks(2, trained, True), strict=True):
        assert all(map(torch.equal, plain, found))


def test_more_functions_than_the_number_are_kept_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    from shoal.tier import Memory
    from shoal.tier.contiguous import ContiguousMemory

    store = ContiguousMemory(Memory(device=torch.device("cpu")), 2)

    with caplog.at_level("WARNING", logger="shoal"):
        spans = [store.place(4, torch.uint8, "inputs").tensor for _ in range(3)]
    memory = [each.untyped_storage().data_ptr() for each in spans]
    assert memory[0] == memory[1] != memory[2] and spans[0].data_ptr() != spans[1].data_ptr()
    assert "more than 2 tensors of 4 elements" in caplog.text


@pytest.mark.parametrize("given", [{"contiguous_checkpointing": True, "num_checkpoints": 2},
                                   {"contiguous_checkpointing": True, "checkpoint_in_cpu": True}])
def test_contiguous_inputs_need_a_place_and_a_number(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="contiguous_checkpointing: needs"):
        checkpointing.configure(**given)


def test_the_section_of_the_configuration_is_read_first() -> None:
    checkpointing.configure(None, {"activation_checkpointing": {"synchronize_checkpoint_boundary": True,
                                                                "number_checkpoints": 7}}, num_checkpoints=2)
    assert checkpointing.is_configured() and checkpointing.options().synchronize_checkpoint_boundary
    assert checkpointing.options().number_checkpoints == 2
    checkpointing.configure()


def kept_graph(choice: str) -> list[Tensor]:
    """Return the gradients of three backward passes through one graph."""
    torch.manual_seed(0)
    checkpointing.configure(**options(choice))
    layer, value = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.rand(3, 8, requires_grad=True)
    result = checkpointing.checkpoint(layer, value * 1.0).sum()
    found = [torch.autograd.grad(result, [value, *layer.parameters()], retain_graph=kept) for kept in (True, True, False)]
    checkpointing.configure()
    return [each for gradients in found for each in gradients]


@pytest.mark.parametrize("choice", ["keep", "slice"])
def test_each_backward_of_a_kept_graph_recomputes_again(choice: str) -> None:
    first, second = run_ranks(2, kept_graph, choice)
    assert len(first) == 9 and all(map(torch.equal, first, second))
    assert all(map(torch.equal, first[:3], first[3:6])) and all(map(torch.equal, first[:3], first[6:]))


def written(kind: str) -> str:
    """Write to an argument between a recomputed function and its backward, and return the message."""
    factor: Any = nn.Parameter(torch.ones(8)) if kind == "parameter" else torch.ones(8, dtype=torch.bool)
    if kind == "marked":
        factor = torch.ones(8)
        factor.no_checkpointing = True
    value = torch.rand(8, requires_grad=True) * 1.0

    def scale(x: Tensor, given: Any) -> Tensor:
        given = given["factors"][0] if isinstance(given, dict) else given
        return (x * given).exp()

    if kind == "keyword":
        result = checkpointing.checkpoint(scale, value, given=factor)
    else:
        result = checkpointing.checkpoint(scale, value, {"factors": [factor]} if kind == "nested" else factor)
    with torch.no_grad():
        (value if kind == "activation" else factor).zero_()
    with pytest.raises(RuntimeError) as caught:
        result.sum().backward()
    return str(caught.value)


@pytest.mark.parametrize(("kind", "path"), [
    ("mask", "argument[1]"), ("parameter", "argument[1]"), ("marked", "argument[1]"), ("keyword", "argument.given"),
    ("nested", "argument[1].factors[0]")])
def test_an_argument_written_to_after_the_call_is_refused(kind: str, path: str) -> None:
    assert f"{path} of scale, of shape (8,), was written to in place" in written(kind)


def test_a_saved_argument_that_is_written_to_is_refused_by_autograd() -> None:
    assert "modified by an inplace operation" in written("activation")


def written_slices() -> str:
    checkpointing.configure(**options("slice"))
    message = written("activation")
    checkpointing.configure()
    return message


def test_an_argument_that_rests_is_refused_like_any_once_it_is_written_to() -> None:
    assert all("argument[0] of scale, of shape (8,), was written to" in found for found in run_ranks(2, written_slices))


def test_tensors_of_inference_mode_are_recomputed_without_versions() -> None:
    with torch.inference_mode():
        mask = torch.ones(8, dtype=torch.bool)
        assert torch.equal(checkpointing.checkpoint(torch.mul, mask, mask), mask)
    value = torch.rand(8, requires_grad=True)
    checkpointing.checkpoint(torch.add, value, mask).sum().backward()
    assert value.grad is not None


@pytest.mark.parametrize(("given", "message"), [
    ({"config": {"activation_checkpointing": {"partition_activation": True}}},
     "activation_checkpointing.partition_activation: unknown key; did you mean 'partition_activations'?"),
    ({"config": {"activation_checkpointing": {"partition_activations": "maybe"}}},
     'activation_checkpointing.partition_activations: got "maybe"; choose true or false'),
    ({"config": {"activation_checkpointing": {"number_checkpoints": "seven"}}},
     'activation_checkpointing.number_checkpoints: got "seven"; give a whole number'),
    ({"config": {"activation_checkpointing": 3}}, "activation_checkpointing: got 3; give a JSON object"),
    ({"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 0},
     "num_checkpoints: got 0; give a number greater than 0"),
    ({"num_checkpoints": "seven"}, 'num_checkpoints: got "seven"; give a whole number'),
    ({"checkpoint_in_cpu": "no"}, 'checkpoint_in_cpu: got "no"; choose true or false'),
    ({"mpu": 3}, "mpu: got 3; give a shoal.Mesh, or an object with get_tensor_model_parallel_group()")])
def test_options_that_configure_cannot_take_are_refused(given: dict[str, Any], message: str) -> None:
    before = checkpointing.options()
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        checkpointing.configure(**given)
    assert checkpointing.options() is before


def test_keys_that_the_engine_reads_are_accepted_in_the_section() -> None:
    checkpointing.configure(None, {"activation_checkpointing": {"recompute": "full", "number_checkpoints": 2.0}})
    assert checkpointing.options().number_checkpoints == 2
    checkpointing.configure(None, {"activation_checkpointing": None})
    assert checkpointing.options().number_checkpoints is None
    checkpointing.configure()


@pytest.mark.parametrize("count", [0, -1, 2.5, True])
def test_a_number_of_layers_below_one_is_refused(count: Any) -> None:
    with pytest.raises(UsageError, match=r"set_num_layers: got .*; give the number of recomputed functions"):
        checkpointing.set_num_layers(count)


@pytest.mark.parametrize("how", ["module", "method", "partial"])
def test_a_recomputed_module_counts_its_statistics_once(how: str) -> None:
    norm, twin = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = torch.randn(6, 4, requires_grad=True)
    function = {"module": norm, "method": norm.forward, "partial": partial(norm.__call__)}[how]
    checkpointing.checkpoint(function, x).sum().backward()
    twin(x).sum().backward()
    assert all(map(torch.equal, norm.state_dict().values(), twin.state_dict().values()))


def test_a_function_that_overwrites_what_autograd_saved_is_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        hidden = x.sigmoid()
        product = hidden * hidden.sin()
        hidden.zero_()
        return product.exp()

    x = torch.randn(6, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="inplace"):
        function(x).sum().backward()
    with pytest.raises(UsageError, match=r"recompute: function wrote in place to a tensor of shape \(6, 4\)"):
        checkpointing.checkpoint(function, x).sum().backward()
