"""Every schedule, ZeRO stage and dtype trains as plain PyTorch does in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.pipeline.layer import LayerSpec, TiedLayerSpec
from shoal.pipeline.module import PipelineModule
from shoal.testing import run_ranks
from tests.devices import TIERS_AGREE

from .small import Case, Result, train, train_plain

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zbv": 2}
"""Stages per rank of each schedule."""


def agree(result: Result, expected: Result, *, tolerance: float) -> None:
    assert result.losses == pytest.approx(expected.losses, rel=tolerance)
    assert result.norms == pytest.approx(expected.norms, rel=max(tolerance, 1e-5))
    for name, weight in expected.weights.items():
        assert torch.allclose(result.weights[name], weight, rtol=tolerance, atol=tolerance), name


def trains(cases: list[Case]) -> list[Result]:
    return [train(case) for case in cases]


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_every_schedule_and_stage_trains_as_one_process_does(schedule: str) -> None:
    """Every pair of schedule, ZeRO stage and tied or untied weights occurs."""
    offset = [*STAGES_PER_RANK].index(schedule)
    cases = [Case(stages=2, schedule=schedule, stages_per_rank=STAGES_PER_RANK[schedule], zero=zero,
                  tied=(offset + zero) % 2 == 0) for zero in range(4)]
    expected = {tied: train_plain(Case(tied=tied), ranks=2) for tied in (False, True)}
    for case, *results in zip(cases, *run_ranks(4, trains, cases), strict=True):
        agree(results[0], expected[case.tied], tolerance=2e-6)
        assert all(result.losses == results[0].losses for result in results), case  # every rank returns the loss


def test_tied_weights_may_skip_a_stage_between_them() -> None:
    cases = [Case(stages=3, schedule=schedule, zero=zero) for schedule in ("1f1b", "zb-h1") for zero in (0, 3)]
    expected = train_plain(cases[0], ranks=1)
    for result in run_ranks(3, trains, cases)[0]:
        agree(result, expected, tolerance=2e-6)


def test_any_in_flight_limit_trains_as_one_process_does() -> None:
    cases = [Case(stages=3, schedule=schedule, zero=zero, config={"pipeline": {"in_flight": limit}})
             for schedule, zero in (("1f1b", 1), ("zb-h1", 3)) for limit in (1, 2, 5, 9)]
    expected = train_plain(cases[0], ranks=1)
    for result in run_ranks(3, trains, cases)[0]:
        agree(result, expected, tolerance=2e-6)


def too_few_in_flight() -> str:
    with pytest.raises(UsageError) as refused:
        train(Case(stages=2, schedule="zbv", stages_per_rank=2, config={"pipeline": {"in_flight": 1}}))
    return str(refused.value)


def test_an_in_flight_limit_not_allowed_is_refused_before_training() -> None:
    expected = "pipeline schedule zbv: in_flight: got 1; on 2 ranks give 2 or more; or choose 1f1b, zb-h1, zb-h2"
    assert run_ranks(2, too_few_in_flight) == [expected] * 2


def test_one_rank_trains_with_every_schedule() -> None:
    cases = [Case(stages=1, schedule=schedule, stages_per_rank=per) for schedule, per in STAGES_PER_RANK.items()]
    expected = train_plain(cases[0], ranks=1)
    for result in run_ranks(1, trains, cases)[0]:
        agree(result, expected, tolerance=2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 4e-2), ("fp16", 2e-2)])
def test_half_precision_trains_as_fp32_within_its_rounding(dtype: str, tolerance: float) -> None:
    cases = [Case(stages=2, schedule=schedule, stages_per_rank=STAGES_PER_RANK[schedule], zero=zero, dtype=dtype)
             for schedule, zero in (("1f1b", 1), ("zbv", 3))]
    expected = train_plain(replace(cases[0], dtype="fp32"), ranks=2)
    for result in run_ranks(4, trains, cases)[0]:
        assert result.losses == pytest.approx(expected.losses, rel=tolerance)
        assert result.norms == pytest.approx(expected.norms, rel=0.1)


def test_recompute_gives_identical_weights() -> None:
    cases = [Case(stages=2, schedule=schedule, stages_per_rank=STAGES_PER_RANK[schedule], zero=zero, interval=interval)
             for schedule in ("1f1b", "zb-h1", "zbv") for zero in (0, 3) for interval in (0, 1, 2)]
    found = run_ranks(2, trains, cases)[0]
    for plain, one, two in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert plain.losses == one.losses == two.losses
        for name, weight in plain.weights.items():
            assert torch.equal(weight, one.weights[name]), name
            assert torch.equal(weight, two.weights[name]), name


def test_offloaded_state_gives_identical_training(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.mktemp("swap"))
    plain = Case(stages=2, schedule="zbv", stages_per_rank=2, zero=3)
    cases = [plain]
    for device in ("cpu", "nvme"):
        place = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
        zero = {"stage": 3, "offload_param": place, "offload_optimizer": place}
        cases.append(replace(plain, config={"zero_optimization": zero}))
    first, *others = run_ranks(2, trains, cases)[0]
    for other in others:
        torch.testing.assert_close(other.losses, first.losses, **TIERS_AGREE)
        torch.testing.assert_close(other.weights, first.weights, **TIERS_AGREE)


class Noted(nn.Module):
    """A layer with dropout and running statistics, whose forward reads a buffer and then writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(torch.relu(self.norm(self.linear(x))))
        x = x + y * (1 + self.get_buffer("mean").clone())
        self.get_buffer("mean").lerp_(y.detach().mean(0), 0.1)
        return x


class Product(nn.Module):
    """A product by a weight, which the last layer ties."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def noted(schedule: str, stage: int, section: dict[str, str]) -> tuple[list[float], dict[str, list[float]], float]:
    model = PipelineModule(
        [TiedLayerSpec("weight", Product), *[LayerSpec(Noted) for _ in range(4)],
         TiedLayerSpec("weight", Product, forward_fn=lambda module, x: x @ module.weight.T)],
        num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform", seed_layers=True, base_seed=1,
        schedule=schedule, stages_per_rank=STAGES_PER_RANK[schedule])
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "activation_checkpointing": section, "timeout": 20})[0]
    torch.manual_seed(engine.global_rank)
    steps = torch.randn(2, 4, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    losses = [engine.train_batch((x, y) for x, y in microbatches).item() for microbatches in steps]
    with shoal.gathered(model):
        weights = sum(parameter.detach().double().abs().sum().item() for parameter in model.parameters())
    return losses, {name: buffer.flatten().tolist() for name, buffer in model.named_buffers()}, weights


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_recompute_keeps_dropout_statistics_buffers_and_ties(schedule: str, stage: int) -> None:
    plain = run_ranks(2, noted, schedule, stage, {})
    for section in ({"recompute": "full"}, {"recompute": "selective"}):
        assert run_ranks(2, noted, schedule, stage, section) == plain
