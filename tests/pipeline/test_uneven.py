"""Uneven stages: nothing to train, skipped layers, dropout, computed biases, a weight tied three times."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.errors import ShoalError
from shoal.testing import run_ranks

from .small import COUNT, WIDTH, WORDS, Block, Case, Embed, data, loss_fn, microbatch


class Out(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x)


def engine_of(layers: list[Any], schedule: str = "1f1b", change: Callable[[nn.Module], object] | None = None,
            **config: Any) -> Any:
    module = shoal.PipelineModule(layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform", seed_layers=True,
                                  schedule=schedule)
    if change is not None:
        change(module)
    return shoal.initialize(model=module, config={**Case().settings, **config})[0]


def frozen() -> list[float]:
    def freeze(module: nn.Module) -> None:
        if dist.get_rank() == 0:
            module.requires_grad_(False)

    layers = [shoal.LayerSpec(Embed), shoal.LayerSpec(Block), shoal.LayerSpec(Block), shoal.LayerSpec(Out)]
    engine = engine_of(layers, change=freeze)
    return [engine.train_batch(data(0, 0)).item() for _ in range(4)]


def test_a_stage_with_nothing_to_train_steps_with_the_others() -> None:
    first, second = run_ranks(2, frozen)
    assert first == second and first[-1] < first[0]


class Skips(Block):
    """Runs its linear layers on even data ranks only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if dist.get_rank() % 2 == 0 else self.norm(x)


def skipping(schedule: str, stage: int) -> list[float]:
    layers = [shoal.LayerSpec(Embed), shoal.LayerSpec(Block), shoal.LayerSpec(Skips), shoal.LayerSpec(Out)]
    engine = engine_of(layers, schedule, zero_optimization={"stage": stage})
    return [engine.train_batch(data(step, engine.mesh.rank("data"))).item() for step in range(3)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_data_rank_that_skips_layers_does_not_hang_the_others(schedule: str) -> None:
    assert run_ranks(4, skipping, schedule, 2)[0] == pytest.approx(run_ranks(4, skipping, "gpipe", 0)[0], rel=1e-5)


def with_two_lengths(schedule: str, stage: int) -> list[float]:
    layers = [shoal.LayerSpec(Embed), shoal.LayerSpec(Block), shoal.LayerSpec(Block), shoal.LayerSpec(Out)]
    engine = engine_of(layers, schedule, zero_optimization={"stage": stage})
    rank = engine.mesh.rank("data")
    return [engine.train_batch(microbatch(step, number, rank, length=(2, 7)[rank]) for number in range(COUNT)).item()
            for step in range(3)]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_data_ranks_with_longer_samples_reduce_as_often(schedule: str) -> None:
    expected = run_ranks(4, with_two_lengths, "gpipe", 0)[0]
    assert run_ranks(4, with_two_lengths, schedule, 2)[0] == pytest.approx(expected, rel=1e-5)


class ComputedBias(nn.Module):
    """Products whose biases are not parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.bias, self.scale = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        return nn.functional.linear(torch.addmm(rows, rows, self.weight), self.weight, self.bias * self.scale).view_as(x)


def computed_biases(schedule: str) -> list[float]:
    layers = [shoal.LayerSpec(Embed), shoal.LayerSpec(ComputedBias), shoal.LayerSpec(ComputedBias), shoal.LayerSpec(Out)]
    engine = engine_of(layers, schedule)
    return [engine.train_batch(data(step, 0)).item() for step in range(3)]


def test_split_backward_works_with_computed_biases() -> None:
    assert run_ranks(2, computed_biases, "zb-h1")[0] == pytest.approx(run_ranks(2, computed_biases, "1f1b")[0], rel=1e-6)


def evaluated() -> list[Any]:
    drops = [shoal.LayerSpec(nn.Dropout, 0.5) for _ in range(2)]
    layers = [shoal.LayerSpec(Embed), *drops, shoal.LayerSpec(Out)]
    engine = engine_of(layers)
    same = engine.eval_batch(data(0, 0)).item() == engine.eval_batch(data(0, 0)).item()
    with pytest.raises(ShoalError, match="the iterator ended after 1 of 4 microbatches"):
        engine.eval_batch(data(0, 0, 1))
    after = engine.train_batch(data(0, 0)).item()  # an evaluation that could not begin changed nothing
    with pytest.raises(ShoalError, match="got a list, which would start anew at every step; pass an iterator"):
        engine.train_batch(list(data(0, 0)))
    return [same, engine.module.training, after > 0]


def test_evaluation_disables_dropout_and_needs_an_iterator() -> None:
    assert run_ranks(2, evaluated) == [[True, True, True]] * 2


def tied_three_times() -> list[str]:
    spec = [shoal.TiedLayerSpec("w", nn.Linear, 4, 4) for _ in range(3)]
    module = shoal.PipelineModule([spec[0], nn.Tanh(), spec[1], spec[2]], num_stages=2, partition_method="uniform",
                                  loss_fn=nn.functional.mse_loss)
    engine = shoal.initialize(model=module, config=Case().settings)[0]
    engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 4))
    return sorted(engine.consolidated_state_dict() or {})


def test_a_weight_of_three_layers_is_saved_under_all_its_names() -> None:
    assert [name for name in run_ranks(2, tied_three_times)[0] if "weight" in name] == ["0.weight", "2.weight", "3.weight"]


def refused() -> str:
    with pytest.raises(ShoalError) as found:
        shoal.initialize(model=nn.Linear(4, 4), config={**Case().settings, "mesh": {"pipeline": 2}})
    return str(found.value)


def test_a_plain_model_with_pipeline_ranks_is_refused() -> None:
    words = "mesh.pipeline asks for 2 pipeline ranks, and the model is a Linear, which has no stages"
    assert words in run_ranks(2, refused)[0]


class LogLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def plain() -> list[str]:
    logging.getLogger("shoal").addHandler(handler := LogLines())
    for settings in ({}, {"schedule": "zb-h1"}):
        shoal.initialize(model=nn.Linear(4, 4), config={**Case().settings, "pipeline": settings})
    return handler.lines


def test_a_schedule_without_a_pipeline_module_gives_a_warning() -> None:
    assert run_ranks(1, plain)[0] == ["pipeline: has no effect: the model is a Linear, and no PipelineModule"]


def detached() -> list[bool]:
    class Cuts(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.detach())

    layers = [shoal.LayerSpec(Embed), shoal.LayerSpec(Block), shoal.LayerSpec(Cuts), shoal.LayerSpec(Out)]
    engine = engine_of(layers, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.train_batch(data(0, 0))
    return [torch.equal(p, before[name]) for name, p in engine.module.named_parameters()]


def test_a_stage_without_gradients_keeps_its_weights() -> None:
    first, second = run_ranks(2, detached)
    assert all(first) and not any(second)


def within_init() -> str:
    with shoal.zero.Init(), pytest.raises(ShoalError) as found:
        Case(stages=2).module()
    return str(found.value)


def test_a_pipeline_within_zero_init_is_refused() -> None:
    assert all("PipelineModule: built within zero.Init" in text for text in run_ranks(2, within_init))


class Places(nn.Module):
    """Projects a parameter and a view of it; the parameter is so large that its memory is unmapped between uses."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(512, 512) / 22)
        self.project = nn.Linear(512, 512)
        self.project_view = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.project(self.places) + self.project_view(self.places.detach()))[:len(x)]


def projected(schedule: str, stage: int) -> tuple[float, float]:
    layers = [shoal.LayerSpec(nn.Linear, 512, 512), shoal.LayerSpec(Places), shoal.LayerSpec(nn.Linear, 512, 512)]
    module = shoal.PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss, seed_layers=True, schedule=schedule)
    engine = shoal.initialize(model=module, config={
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}})[0]
    random = torch.Generator().manual_seed(dist.get_rank())
    samples = [(torch.randn(4, 512, generator=random), torch.randn(4, 512, generator=random)) for _ in range(4)]
    losses = [engine.train_batch(iter(samples[start:start + 2])).item() for start in (0, 2)]
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return losses[-1], norm


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_a_parameter_used_as_activation_is_gathered_for_w(schedule: str) -> None:
    assert run_ranks(2, projected, schedule, 3)[0] == pytest.approx(run_ranks(2, projected, "1f1b", 0)[0], rel=1e-5)
