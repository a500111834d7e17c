"""1-bit Adam, 1-bit LAMB and 0/1 Adam send one bit an element each way, and the compression error loses nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal import onebit
from shoal.errors import ConfigError, NotSupportedYet, ShoalError, UsageError
from shoal.native import step as native
from shoal.optim.onebit import OneBitAdam, ZeroOneAdam, floored_variance
from shoal.optim.onebit_lamb import OneBitLamb
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

from .compressed_runs import (
    FREEZE,
    KINDS,
    LOCAL_STEPS,
    PARAMS,
    WARM,
    Whole,
    batch,
    engine_of,
    lower_rate,
    model,
    train,
    weights,
)


def trained(stage: int, steps: int, kind: str = "OneBitAdam", **config: Any) -> tuple[list[float], Tensor, list[int]]:
    params = PARAMS | WARM.get(kind, {})
    engine = shoal.initialize(model=model(), config={
        "train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage},
        "optimizer": {"type": kind, "params": params}, **config})[0]
    losses, sent = [], []
    for step in range(steps):
        before = traffic.bytes["reduce"] + traffic.bytes["publish"]
        losses += train(engine, range(step, step + 1))
        sent.append(traffic.bytes["reduce"] + traffic.bytes["publish"] - before)
    return losses, weights(engine), sent


@pytest.mark.parametrize(("kind", "exact"), [("OneBitAdam", "AdamW"), ("ZeroOneAdam", "AdamW"), ("OneBitLamb", "Lamb")])
def test_the_warm_up_is_bitwise_the_uncompressed_optimizer(kind: str, exact: str) -> None:
    ours, other = (run_ranks(2, trained, 1, FREEZE, each) for each in (kind, exact))
    for (losses, weight, _), (expected, same, _) in zip(ours, other, strict=True):
        assert losses == expected and torch.equal(weight, same)


@pytest.mark.parametrize(("kind", "ranks"), [("OneBitAdam", 2), ("OneBitAdam", 3), ("OneBitLamb", 2), ("ZeroOneAdam", 3)])
def test_stages_0_to_2_train_the_same_weights_on_every_rank(kind: str, ranks: int) -> None:
    found = [each for stage in (0, 1, 2) for each in run_ranks(ranks, trained, stage, FREEZE + 5, kind)]
    assert all(torch.equal(weight, found[0][1]) for _, weight, _ in found)
    assert found[0][0] == found[ranks][0] == found[2 * ranks][0]


def sizes() -> list[int]:
    return [unit.layout.size for unit in engine_of().sharded.units]  # pyright: ignore


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_sends_a_bit_an_element_each_way_and_a_scale_a_block(ranks: int) -> None:
    shards = [size // ranks for size in run_ranks(ranks, sizes)[0]]
    for _, _, sent in run_ranks(ranks, trained, 1, FREEZE + 2):
        assert sent[:FREEZE] == [2 * 4 * (ranks - 1) * sum(shards)] * FREEZE
        assert sent[FREEZE:] == [2 * (ranks - 1) * sum(onebit.packed_bytes(shard) for shard in shards)] * 2


def test_0_1_adam_sends_full_gradients_at_and_before_variance_updates() -> None:
    shard = [size // 2 for size in run_ranks(2, sizes)[0]]
    whole, packed = 4 * sum(shard), sum(onebit.packed_bytes(each) for each in shard)
    optimizer = ZeroOneAdam([nn.Parameter(torch.ones(1))], var_update_scaler=FREEZE, var_freeze_step=30)
    measured = [step for step in range(1, 51) if optimizer.updates_variance(optimizer.param_groups[0], step)]
    assert measured == [1, 2, 3, 4, 5, 7, 9, 11, 13, 17, 21, 25, 29]
    for _, _, sent in run_ranks(2, trained, 1, 24, "ZeroOneAdam"):
        for step, bytes in enumerate(sent, 1):
            exact = step in measured or step + 1 in measured
            assert bytes == (whole if exact else packed) + (whole if step <= FREEZE else packed), step


def compare_with_formula() -> None:
    """Compare steps with the formula, computed for the whole buffer of every rank."""
    engine = engine_of(build=Whole)
    assert engine.sharded is not None and engine.optimizer is not None
    rank, ranks = engine.global_rank, engine.world_size
    (unit,) = engine.sharded.units
    train(engine, range(FREEZE))
    engine.sharded.finish_pending()
    layout, shard = unit.layout, unit.layout.size // ranks
    master = unit.full.clone()
    (view,) = engine.optimizer.views.views
    state = engine.optimizer.optimizer.state[view.parameter]
    everywhere = engine.communicator.gather_objects((state["exp_avg"], state["exp_avg_sq"]))
    pad = [torch.zeros(layout.size) for _ in range(2)]
    for at, moments in enumerate(everywhere):
        for whole, part in zip(pad, moments, strict=True):
            whole[at * shard:][:len(part)] = part
    momentum, variance = pad
    residuals, published, full = [torch.zeros(layout.size) for _ in range(ranks)], master.clone(), master.clone()
    reference = Whole()
    for step in range(FREEZE, FREEZE + 3):
        total, own = torch.zeros(layout.size), torch.zeros(layout.size)
        for at in range(ranks):
            for parameter, values in zip(reference.parameters(), layout.views(published), strict=True):
                parameter.data.copy_(values)
                parameter.grad = None
            x, y = batch(step, at)
            nn.functional.mse_loss(reference(x), y).backward()
            for parameter, into in zip(reference.parameters(), layout.views(residuals[at]), strict=True):
                assert parameter.grad is not None
                into += parameter.grad / ranks
            for to in range(ranks):
                mine, into = (whole.view(ranks, shard)[to] for whole in (residuals[at], total))
                if to == at:
                    into += mine
                    own.view(ranks, shard)[to] += mine
                    mine.zero_()
                else:
                    packed = torch.zeros(onebit.packed_bytes(shard), dtype=torch.uint8)
                    onebit.pack(mine, packed)
                    onebit.unpack(packed, into, accumulate=True)
        for buffer in (total, *residuals):
            layout.clear_gaps(buffer)
        momentum = 0.9 * momentum + 0.1 * total
        variance = 0.999 * variance + 0.001 * (ranks * own**2 + (1 - 1 / ranks) * momentum**2)
        time, ahead = step + 1, momentum + (total - momentum) / 9
        held = len(everywhere[0][1])
        least = torch.cat([torch.cat([floored_variance(part[:held], 0.01), part[held:]])
                           for part in variance.view(ranks, shard)])
        full = full * (1 - 1e-3) - 1e-2 / (1 - 0.9**time) * ahead / ((least / (1 - 0.999**time)).sqrt() + 1e-8)
        for ahead, behind in zip(full.view(ranks, shard), published.view(ranks, shard), strict=True):
            packed = torch.zeros(onebit.packed_bytes(shard), dtype=torch.uint8)
            onebit.difference(ahead.contiguous(), behind, packed)
            onebit.unpack(packed, behind, accumulate=True)
        layout.clear_gaps(published)
        train(engine, range(step, step + 1))
        for parameter, values in zip(engine.module.parameters(), layout.views(published), strict=True):
            flipped = ((parameter.detach() - values).abs() > 3e-5).float().mean()  # rounding decides signs near zero
            assert flipped < 0.01, step
    assert rank == engine.global_rank


def test_a_compressed_step_equals_the_formula() -> None:
    run_ranks(2, compare_with_formula)


def missing_gradient() -> float:
    """Return the largest difference of all gradients from the applied ones plus the compression errors, over all ranks."""
    engine = engine_of(build=Whole)
    assert engine.sharded is not None
    (unit,) = engine.sharded.units
    train(engine, range(FREEZE))
    gradient = unit.gradient
    assert gradient is not None
    applied, given = torch.zeros_like(gradient.own), torch.zeros(unit.layout.size)
    for step in range(FREEZE, FREEZE + 6):
        x, y = batch(step, engine.global_rank)
        plain = Whole()
        plain.load_state_dict({name: value.clone() for name, value in engine.module.state_dict().items()})
        nn.functional.mse_loss(plain(x), y).backward()
        for into, parameter in zip(unit.layout.views(given), plain.parameters(), strict=True):
            assert parameter.grad is not None
            into += parameter.grad / engine.world_size
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.sharded.flush()
        applied += gradient.own
        engine.step()
    assert gradient.accumulator.residual is not None
    everything = engine.communicator.gather_objects((given - gradient.accumulator.residual, applied))
    shard = len(applied)
    sums = [sum(sent for sent, _ in everything)[rank * shard:][:shard] for rank in range(engine.world_size)]
    return max((total - applied).abs().max().item() for total, (_, applied) in zip(sums, everything, strict=True))


def test_the_compression_error_is_applied_later() -> None:
    assert max(run_ranks(3, missing_gradient)) < 1e-6


def overflowing(bad: float, kind: str) -> tuple[int, list[bool], bool, Tensor]:
    engine = engine_of(kind=kind)
    assert engine.sharded is not None
    applied: list[bool] = []
    for step in range(FREEZE + 5):
        x, y = batch(step, engine.global_rank)
        if step == FREEZE + 2 and engine.global_rank == 1:
            x[0, 0] = bad
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        applied.append(engine.was_step_applied())
    finite = all(bool(unit.gradient.accumulator.residual.isfinite().all()) for unit in engine.sharded.trainable  # pyright: ignore
                 if unit.gradient.accumulator.residual is not None)
    return engine.skipped_steps, applied, finite, weights(engine)


@pytest.mark.parametrize(("bad", "kind"), [(float("nan"), "OneBitAdam"), (float("inf"), "OneBitAdam"),
                                           (float("inf"), "OneBitLamb"), (float("nan"), "ZeroOneAdam")])
def test_a_non_finite_gradient_skips_the_step_and_state_stays_finite(bad: float, kind: str) -> None:
    found = run_ranks(2, overflowing, bad, kind)
    for skipped, applied, finite, weight in found:
        assert skipped == 1 and applied == [step != FREEZE + 2 for step in range(FREEZE + 5)] and finite
        assert weight.isfinite().all() and torch.equal(weight, found[0][3])


def resumed(folder: str, first: int, last: int, config: dict[str, Any]) -> tuple[list[float], Tensor, Tensor]:
    engine = engine_of(**config)
    if first:
        engine.load_checkpoint(folder)
    losses: list[float] = []
    for step in range(first, last):
        losses += train(engine, range(step, step + 1))
        if config.get("params"):
            lower_rate(engine)
    assert engine.sharded is not None
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    kept = torch.zeros(sum(unit.layout.elements for unit in engine.sharded.units))
    at = 0
    for unit in engine.sharded.trainable:
        residual = unit.gradient.accumulator.residual
        for view in () if residual is None else unit.layout.views(residual):
            kept[at:at + view.numel()] = view.flatten()
            at += view.numel()
    return losses, weights(engine), sum(engine.communicator.gather_objects(kept), torch.zeros_like(kept))


@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}, {"kind": "OneBitLamb"}, {"kind": "ZeroOneAdam"},
                                    {"kind": "ZeroOneAdam", "params": {**LOCAL_STEPS, "local_step_scaler": 2}}],
                         ids=["fp32", "bf16", "1-bit LAMB", "0/1 Adam", "after a still step"])
def test_a_resumed_run_is_bitwise_and_another_topology_keeps_the_sum(tmp_path: Path, config: dict[str, Any]) -> None:
    whole = run_ranks(2, resumed, str(tmp_path / "a"), 0, FREEZE + 6, config)
    run_ranks(2, resumed, str(tmp_path / "b"), 0, FREEZE + 3, config)
    for ranks in (3, 1):
        kept = run_ranks(2, resumed, str(tmp_path / "b"), FREEZE + 3, FREEZE + 3, config)[0][2]
        (_, _, other), *_ = run_ranks(ranks, resumed, str(tmp_path / "b"), FREEZE + 3, FREEZE + 3, config)
        torch.testing.assert_close(other, kept, rtol=1e-5, atol=1e-8)
    run_ranks(2, resumed, str(tmp_path / "c"), 0, FREEZE + 3, config)
    again = run_ranks(2, resumed, str(tmp_path / "c"), FREEZE + 3, FREEZE + 6, config)
    for (losses, weight, _), (expected, other, _) in zip(again, whole, strict=True):
        assert losses == expected[FREEZE + 3:] and torch.equal(weight, other)


def composed(config: dict[str, Any]) -> tuple[list[float], Tensor]:
    engine = engine_of(**config)
    losses = train(engine, range(3 * FREEZE * engine.gradient_accumulation_steps()), rank=engine.global_rank)
    return losses, weights(engine)


@pytest.mark.parametrize("config", [
    {"gradient_clipping": 0.1}, {"gradient_accumulation_steps": 2}, {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 2}},
    {"communication_data_type": "bf16"}, {"mesh": {"pipeline": 1}},
    {"kind": "OneBitLamb", "gradient_clipping": 0.1, "bf16": {"enabled": True}},
    {"kind": "OneBitLamb", "fp16": {"enabled": True}}, {"kind": "OneBitLamb", "mesh": {"tensor": 1}},
    {"kind": "ZeroOneAdam", "gradient_clipping": 0.1, "gradient_accumulation_steps": 2},
], ids=lambda config: ", ".join(map(str, config)))
def test_compression_composes_with_other_features(config: dict[str, Any]) -> None:
    (losses, weight), (_, other) = run_ranks(2, composed, config)
    assert torch.equal(weight, other) and sum(losses[-3:]) < sum(losses[:3])


def test_a_variance_is_at_least_a_fraction_of_its_blocks_mean() -> None:
    variance = torch.cat([torch.tensor([0.0, 1e-9, 1.0, 3.0]), torch.zeros(1020), torch.tensor([5.0, 0.0])])
    least = 0.1 * 4 / 1024
    expected = torch.cat([torch.tensor([least, least, 1.0, 3.0]), torch.full((1020,), least), torch.tensor([5.0, 0.25])])
    torch.testing.assert_close(floored_variance(variance, 0.1), expected)


def test_slices_and_native_code_step_as_the_class_does() -> None:
    """Whole parameters, slices by torch and slices by native code take equal steps."""
    random = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(9, 3000, generator=random)
    found: list[Tensor] = []
    for by_native in (True, False):
        weight, moments = start.clone(), [torch.zeros(3000), torch.zeros(3000)]
        for time, gradient in enumerate(gradients, 1):
            addend, constants = gradient * 0.4 + 0.1, [0.1, 0.999, 1 - 0.999, 0.01 / (1 - 0.9**time),
                                                       (1 - 0.999**time)**-0.5, 1e-8, 1e-3]
            if by_native:
                native.step(native.Rule.ONE_BIT_ADAM, weight, moments, gradient, [*constants, 1 / 9, 2, 0.01, 0.0],
                            addend=addend)
            else:
                optimizer = found_optimizer(weight, moments, time)
                optimizer.step_tensor(weight, gradient, optimizer.param_groups[0], addend=addend, addends=2)
        found.append(weight)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def found_optimizer(weight: Tensor, moments: list[Tensor], time: int) -> OneBitAdam:
    """Return an optimizer past its warm-up whose moments are those, before step `time`."""
    optimizer = OneBitAdam([weight], lr=0.01, freeze_step=1, weight_decay=0.1)
    optimizer.param_groups[0]["applied_steps"] = 100
    optimizer.state[weight] = {"step": torch.tensor(float(time - 1)), "taken": torch.tensor(float(time - 1)),
                               "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    return optimizer


def by_torch(kind: str, clipping: float, more: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the weights that an optimizer by name trains, and those of an instance, which is stepped by torch."""
    named, whole, params = engine_of(1, more, kind=kind, gradient_clipping=clipping), model(), PARAMS | WARM[kind] | more
    params.pop("local_step_clipper", None)
    optimizer = (OneBitAdam, OneBitLamb, ZeroOneAdam)[KINDS.index(kind)](whole.parameters(), **params)
    given = shoal.initialize(model=whole, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 8, "gradient_clipping": clipping, "zero_optimization": {"stage": 1}})[0]
    for engine in (named, given):
        train(engine, range(FREEZE + 3))
    return weights(named), weights(given)


@pytest.mark.parametrize("more", [{}, {"variance_floor": 0, "look_ahead": 0}], ids=str)
@pytest.mark.parametrize("clipping", [0.0, 0.05])
@pytest.mark.parametrize("kind", KINDS)
def test_an_instance_keeps_its_moments_and_trains_as_its_name_does(kind: str, clipping: float, more: dict[str, Any]) -> None:
    for named, given in run_ranks(2, by_torch, kind, clipping, more):
        assert (named - given).abs().mean() < 1e-4


def test_the_compression_error_follows_a_changed_loss_scale(tmp_path: Path) -> None:
    fp16 = {"fp16": {"enabled": True, "loss_scale": 1024.0}}
    saved = run_ranks(2, resumed, str(tmp_path), 0, FREEZE + 3, fp16)[0][2]
    loaded = run_ranks(2, resumed, str(tmp_path), FREEZE + 3, FREEZE + 3, {"bf16": {"enabled": True}})[0][2]
    torch.testing.assert_close(loaded * 1024, saved)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], type[ShoalError], str]] = {
    "stage": ({"zero_optimization": {"stage": 3}}, {}, ConfigError, r"stage: got 3 with OneBitAdam.*choose 0, 1 or 2"),
    "copies": ({"zero_optimization": {"stage": 1, "mics_shard_size": 1}}, {}, ConfigError, "mics_shard_size: got 2 copies"),
    "offload": ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, {}, NotSupportedYet,
                "offload_optimizer.device: got 'cpu' with OneBitAdam"),
    "late": ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}}},
             {"freeze_step": 5e1}, ConfigError, "OneBitAdam: freeze_step: got 50.0, and the schedule has 50 steps"),
    "by torch": ({"kind": "ZeroOneAdam", "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 1, "total_steps": 9}}},
                 {"var_update_scaler": 10}, ConfigError, "var_update_scaler: got 10, and .* 9 steps.*give 1, a fifth"),
    "bound": ({"build": lambda: nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 1))}, {}, ConfigError,
              "embedding '0' has max_norm=1 with OneBitAdam"),
    "rows": ({"sparse_gradients": True}, {}, ConfigError, "sparse_gradients: got true with OneBitAdam.*or take AdamW"),
    "amsgrad": ({}, {"amsgrad": True}, ConfigError, "amsgrad: got true"),
    "freeze": ({}, {"freeze_step": 0}, ConfigError, "freeze_step: got 0"),
    "never": ({}, {"freeze_step": float("inf")}, ConfigError, "freeze_step: got inf; give a whole number"),
    "floor": ({}, {"variance_floor": 2}, ConfigError, "variance_floor=2"),
    "ahead": ({}, {"look_ahead": -1}, ConfigError, "look_ahead=-1"),
    "scaler": ({"kind": "ZeroOneAdam"}, {"var_update_scaler": 0.5}, ConfigError, "var_update_scaler: got 0.5; give a whole"),
    "clipper": ({"kind": "ZeroOneAdam"}, {"local_step_clipper": 100}, ConfigError,
                "local_step_clipper: got 100; with beta1 0.9 no momentum is left after so many steps: give 65 at most"),
    "lamb": ({"kind": "OneBitLamb"}, {"freeze_step": 0}, ConfigError, "OneBitLamb: freeze_step: got 0"),
    "factor": ({"kind": "OneBitLamb"}, {"factor_min": 2}, ConfigError, "factor_min=2, factor_max=4.0.*either side of 1"),
    "lamb's stage": ({"kind": "OneBitLamb", "zero_optimization": {"stage": 3}}, {}, ConfigError, "got 3 with OneBitLamb"),
}  # fmt: skip


def refused() -> dict[str, str]:
    said: dict[str, str] = {}
    for kind, (config, params, error, _) in REFUSED.items():
        with pytest.raises(error) as caught:
            engine_of(params=params, **config)
        said[kind] = str(caught.value)
    with pytest.raises(UsageError) as caught:
        shoal.initialize(model=model(), optimizer=lambda groups: OneBitAdam(groups), config={"train_batch_size": 2})
    said["function"] = str(caught.value)
    return said


def test_an_unsupported_combination_is_refused_with_the_allowed_ones() -> None:
    said = run_ranks(2, refused)[0]
    assert "name it in the configuration, or pass an instance" in said.pop("function")
    assert [said[kind] for kind in said if not re.search(REFUSED[kind][3], said[kind])] == []


@pytest.mark.parametrize(("option", "said"), [
    ({"lr": "a"}, "lr='a'.*give numbers"), ({"lr": -1.0}, "none may be negative"),
    ({"betas": (2, 3)}, r"betas=\(2, 3\)"), ({"freeze_step": -5}, "freeze_step: got -5"),
])  # fmt: skip
def test_the_options_of_every_group_are_checked(option: dict[str, Any], said: str) -> None:
    for kind in (OneBitAdam, OneBitLamb):
        with pytest.raises(ConfigError, match=said):
            kind([{"params": [nn.Parameter(torch.ones(4))], **option}])
