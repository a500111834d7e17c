"""Dividing before or after the sum gives the same mean at every stage, unless 16-bit sums overflow or underflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.engine.engine import Engine
from shoal.engine.schema import Config
from shoal.errors import ConfigError
from shoal.testing import run_ranks

from .trained import build, configured, same, train, weights

SGD = {"type": "SGD", "params": {"lr": 1.0}}
PRESCALED, POSTSCALED = {"prescale_gradients": True}, {"prescale_gradients": False}


def trained(stage: int, variants: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = []
    for variant in variants:
        engine = build(stage, gradient_accumulation_steps=2, **variant)
        train(engine, 3)
        found.append(weights(engine))
    return found


def bitwise(stage: int, variants: list[dict[str, Any]]) -> list[bool]:
    first, *others = trained(stage, variants)
    return [same(first, other) for other in others]


@pytest.mark.parametrize("stage", range(4))
def test_dividing_by_powers_of_two_before_or_after_the_sum_is_bit_equal(stage: int) -> None:
    places = [{}, PRESCALED, POSTSCALED, {"gradient_predivide_factor": 2.0}, {"gradient_predivide_factor": 0.25}]
    assert run_ranks(2, bitwise, stage, places)[0] == [True] * 4


def furthest(stage: int, variants: list[dict[str, Any]]) -> list[tuple[float, bool]]:
    """Return the largest difference of each other variant from the first, and whether any bit differs."""
    first, *others = trained(stage, variants)
    return [(max((first[name] - other[name]).abs().max().item() for name in first), not same(first, other))
            for other in others]


@pytest.mark.parametrize("stage", [0, 3])
def test_dividing_by_other_factors_is_equal_within_rounding(stage: int) -> None:
    plain = {"optimizer": SGD | {"params": {"lr": 0.1}}}
    places = [plain | place for place in (PRESCALED, POSTSCALED, {"gradient_predivide_factor": 1.7})]
    for distance, differs in run_ranks(3, furthest, stage, places)[0]:
        assert distance < 1e-6 and differs  # it differs: the factor was applied


class Steep(nn.Module):
    """A loss whose gradient is `slope` in every element."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
        for block in self.blocks:
            nn.init.zeros_(block.weight)

    def forward(self, slope: float) -> Tensor:
        return sum((block(torch.ones(1, 8)).sum() * slope for block in self.blocks), torch.zeros(()))


def stepped(stage: int, slopes: list[float], extra: dict[str, Any]) -> tuple[bool, list[float]]:
    """Step on the gradient of one slope per rank; return whether the step was applied, and the values of the weights."""
    config = configured(stage, optimizer=SGD, gradient_clipping=0, communication_data_type="fp16", **extra)
    engine: Engine = shoal.initialize(model=Steep(), config=config)[0]
    engine.backward(engine(slopes[dist.get_rank()]))
    engine.step()
    return engine.was_step_applied(), sorted({value for tensor in weights(engine).values() for value in
                                              tensor.flatten().tolist()})


@pytest.mark.parametrize("stage", range(4))
def test_dividing_before_the_sum_avoids_overflow_in_16_bit(stage: int) -> None:
    slope = 1.5 * 2.0 ** 16  # of rank 0 alone: beyond fp16's 65,504, and half of it is not
    for place in ({}, POSTSCALED, {"gradient_predivide_factor": 1.0}):
        assert run_ranks(2, stepped, stage, [slope, 0.0], place)[0] == (False, [0.0]), place
    for place in (PRESCALED, {"gradient_predivide_factor": 2.0}, {"gradient_predivide_factor": 4.0}):
        assert run_ranks(2, stepped, stage, [slope, 0.0], place)[0] == (True, [-slope / 2]), place


@pytest.mark.parametrize("stage", range(4))
def test_dividing_after_the_sum_avoids_underflow_in_16_bit(stage: int) -> None:
    slope = 2.0 ** -24  # the smallest of fp16
    assert run_ranks(2, stepped, stage, [slope, slope], PRESCALED)[0] == (True, [0.0])
    for place in ({}, POSTSCALED, {"gradient_predivide_factor": 0.5}):
        assert run_ranks(2, stepped, stage, [slope, slope], place)[0] == (True, [-slope]), place


def summed(stage: int) -> list[bool]:
    ranks = dist.get_world_size()
    mean = {"optimizer": {"type": "SGD", "params": {"lr": 0.25 * ranks}}, "gradient_clipping": 0}
    total = {"optimizer": {"type": "SGD", "params": {"lr": 0.25}}, "gradient_clipping": 0, "gradient_allreduce_op": "SUM"}
    return bitwise(stage, [mean, total, total | {"gradient_predivide_factor": 4.0}])


@pytest.mark.parametrize("stage", range(4))
def test_op_sum_gives_ranks_times_the_mean_gradient(stage: int) -> None:
    assert run_ranks(2, summed, stage)[0] == [True, True]


def accessors_of(**extra: Any) -> tuple[bool, float]:
    engine = build(1, **extra)
    return engine.postscale_gradients(), engine.gradient_predivide_factor()


def accessors_by_setting() -> list[tuple[bool, float]]:
    half = {"bf16": {"enabled": True}}
    return [accessors_of(), accessors_of(**half), accessors_of(**PRESCALED, **half), accessors_of(**POSTSCALED),
            accessors_of(gradient_predivide_factor=1.5), accessors_of(gradient_predivide_factor=1.0)]


def test_accessors_report_where_gradients_are_divided() -> None:
    assert run_ranks(2, accessors_by_setting)[0] == [(False, 2), (True, 1), (False, 2), (True, 1), (True, 1.5), (True, 1)]


@pytest.mark.parametrize(("other", "message"), [
    ({"gradient_predivide_factor": 2.0},
     "prescale_gradients: got true beside gradient_predivide_factor: the whole division is before the sum, or a part of it; "
     "remove one of them"),
    ({"gradient_allreduce_op": "sum"},
     'prescale_gradients: got true beside gradient_allreduce_op "sum", which divides by nothing; remove one of them, or '
     "give gradient_predivide_factor against overflow"),
])  # fmt: skip
def test_conflicting_division_settings_are_refused(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config.resolve({"train_batch_size": 2, **PRESCALED, **other}, data_ranks=2)
    assert str(raised.value) == message
