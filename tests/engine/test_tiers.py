"""State on disk: saved, loaded into any other tier, built there, written to, and the errors of disks."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.engine import storage_plan
from shoal.engine.training_state import weights_to_save
from shoal.errors import ConfigError, ShoalError, TierError
from shoal.testing import run_ranks
from shoal.tier import store as stores
from shoal.zero.ownership import owner_of
from shoal.zero.unit import Unit
from tests.devices import TIERS_AGREE

NOTHING: dict[str, Any] = {}
STATE: dict[str, Any] = {"offload_optimizer": {"device": "nvme"}}
WEIGHTS: dict[str, Any] = {"offload_param": {"device": "nvme"}}
ALL: dict[str, Any] = {**STATE, **WEIGHTS}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40)) for _ in range(3)))


def config(folder: str, tier: dict[str, Any], stage: int = 3, **more: Any) -> dict[str, Any]:
    placed = {key: {**block, "nvme_path": folder} for key, block in tier.items()}
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.1, "timeout": 20,
            "zero_optimization": {"stage": stage, "sub_group_size": 1000, **placed},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, **more}


def engine_of(folder: str, tier: dict[str, Any], stage: int = 3, **more: Any) -> shoal.Engine:
    return shoal.initialize(model=build(), config=config(folder, tier, stage, **more))[0]


def train(engine: shoal.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(100 * step + engine.global_rank)
        x = torch.randn(2, 40, dtype=next(iter(engine.module.parameters())).dtype)
        loss = engine(x).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole(engine: shoal.Engine) -> dict[str, Tensor]:
    return engine.consolidated_state_dict(dtype=torch.float32) or {}


# Checkpoints


def saved_and_loaded(folder: str, first: dict[str, Any], second: dict[str, Any], more: dict[str, Any]) -> tuple[Any, Any]:
    engine = engine_of(folder, first, **more)
    train(engine, range(2))
    engine.save_checkpoint(f"{folder}/saved", tag="here")
    straight = train(engine, range(2, 4)), whole(engine)
    engine.destroy()
    other = engine_of(folder, second, stage=1, **more)
    other.load_checkpoint(f"{folder}/saved", tag="here")
    again = train(other, range(2, 4)), whole(other)
    other.destroy()
    return straight, again


@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("first", "second"), [(ALL, NOTHING), (NOTHING, ALL), (STATE, WEIGHTS), (WEIGHTS, STATE)])
def test_a_checkpoint_of_one_tier_resumes_in_another(first: Any, second: Any, more: Any, tmp_path: Path) -> None:
    straight, again = run_ranks(2, saved_and_loaded, str(tmp_path), first, second, more)[0]
    assert straight[0] == pytest.approx(again[0], rel=1e-6 if not more else 1e-2)
    for name, weight in straight[1].items():
        torch.testing.assert_close(again[1][name], weight, rtol=1e-5 if not more else 2e-2, atol=1e-6 if not more else 1e-2)


# Models built on disk


def built(folder: str, tier: dict[str, Any], remote: str | None = None) -> tuple[list[float], dict[str, Tensor], int]:
    given = config(folder, tier)
    here = {"zero_optimization": {"offload_param": {"nvme_path": folder}}}
    with shoal.zero.Init(config=given if remote is None else here, remote_device=remote):
        model = build()
    resting = len(list(Path(folder).glob("shoal-swap-*/*.swap")))
    engine = shoal.initialize(model=model, config=given)[0]
    losses = train(engine, range(3))
    weights = whole(engine)
    engine.destroy()
    return losses, weights, resting


def test_a_model_built_on_disk_trains_as_one_built_in_memory(tmp_path: Path) -> None:
    there, here = run_ranks(2, built, str(tmp_path), ALL)[0], run_ranks(2, built, str(tmp_path), NOTHING)[0]
    assert (there[2], here[2]) == (2, 0)
    torch.testing.assert_close(there[:2], here[:2], **TIERS_AGREE)
    assert list(tmp_path.iterdir()) == []


def test_remote_device_decides_where_a_model_is_built(tmp_path: Path) -> None:
    there, here = run_ranks(1, built, str(tmp_path), NOTHING, "nvme")[0], run_ranks(1, built, str(tmp_path), NOTHING)[0]
    assert (there[2], here[2]) == (1, 0)
    assert there[0] == here[0]
    assert list(tmp_path.iterdir()) == []


def away(given: dict[str, Any], **more: Any) -> bool:
    stores.HOST = torch.device("cpu", 0)  # torch takes it for another device than "cpu"
    with shoal.zero.Init(config=given, **more):
        model = build()
    owner = owner_of(next(iter(model.parameters())))
    assert isinstance(owner, Unit)
    return owner.memory.is_offloaded


@pytest.mark.parametrize(("zero", "more", "expected"), [
    ({"cpu_offload_param": True}, {}, True), ({"offload_param": {"device": "cpu"}}, {}, True), ({}, {}, False),
    ({"cpu_offload_param": True}, {"remote_device": "cuda"}, False), ({}, {"remote_device": "cpu"}, True),
])  # fmt: skip
def test_every_spelling_of_the_configuration_places_a_built_model(zero: Any, more: Any, expected: bool) -> None:
    assert run_ranks(1, away, {"zero_optimization": zero}, **more) == [expected]


def test_wrong_keys_given_to_zero_init_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"zero\.Init: zero_optimization\.offload_param\.device: got .nvm."):
        shoal.zero.Init(config={"zero_optimization": {"offload_param": {"device": "nvm"}}})
    with pytest.raises(ConfigError, match=r"zero\.Init: remote_device: device: got .nvme. without nvme_path"):
        shoal.zero.Init(remote_device="nvme")


# Reading and writing weights that rest on disk


def written(folder: str, stage: int) -> list[Tensor]:
    engine = engine_of(folder, ALL, stage)
    model = engine.module
    first = model[0][0].weight  # type: ignore[index]
    with shoal.gathered(first, modifier_rank=0):
        if engine.global_rank == 0:
            first.data.fill_(0.5)
    with shoal.gathered(model):
        found = [first.detach().clone()]
    train(engine, range(1))
    engine.load_module_state_dict({name: torch.full_like(p, 0.25, device="cpu") for name, p in build().named_parameters()})
    with shoal.gathered(model):
        found.append(first.detach().clone())
    engine.destroy()
    found.append(first.detach().clone())
    return found


@pytest.mark.parametrize("stage", range(4))
def test_writes_into_weights_on_disk_persist(stage: int, tmp_path: Path) -> None:
    for found in run_ranks(2, written, str(tmp_path), stage):
        assert [tensor.unique().tolist() for tensor in found] == [[0.5], [0.25], [0.25]]


class Clamped(nn.Linear):
    """A layer that keeps its weights positive, in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(min=0)
        return super().forward(x)


def clamped(folder: str, tier: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Clamped(40, 40) for _ in range(3)))
    engine = shoal.initialize(model=model, config=config(folder, tier, 1))[0]
    losses = train(engine, range(3))
    engine.destroy()
    return losses


def test_writes_of_a_forward_into_weights_on_disk_persist(tmp_path: Path) -> None:
    on_disk, resident = run_ranks(2, clamped, str(tmp_path), ALL), run_ranks(2, clamped, str(tmp_path), NOTHING)
    torch.testing.assert_close(on_disk, resident, **TIERS_AGREE)


def copied(folder: str) -> bool:
    engine = engine_of(folder, ALL, 0)
    train(engine, range(1))
    twin, x = copy.deepcopy(engine.module).eval(), torch.randn(3, 40)
    return torch.equal(twin(x), engine(x))


def test_a_model_with_unsharded_weights_on_disk_can_be_copied(tmp_path: Path) -> None:
    assert run_ranks(2, copied, str(tmp_path)) == [True, True]


def read_outside(folder: str) -> tuple[float, float]:
    engine = engine_of(folder, WEIGHTS, 0)
    weight = engine.module[0][0].weight  # type: ignore[index]
    before = weight.detach().sum().item()
    with torch.no_grad():
        weight.mul_(2)
    train(engine, range(0))
    engine.empty_partition_cache()
    engine(torch.randn(1, 40))
    return before, weight.detach().sum().item()


def test_unsharded_weights_on_disk_are_readable_and_writable_anywhere(tmp_path: Path) -> None:
    before, after = run_ranks(1, read_outside, str(tmp_path))[0]
    assert after == pytest.approx(2 * before, rel=1e-6)


def moments(folder: str, tier: dict[str, Any]) -> list[float]:
    engine = engine_of(folder, tier)
    train(engine, range(2))
    assert engine.optimizer is not None
    return [state["exp_avg_sq"].sum().item() for state in engine.optimizer.state.values()]


def test_moments_on_disk_can_be_read(tmp_path: Path) -> None:
    there, here = run_ranks(1, moments, str(tmp_path), ALL)[0], run_ranks(1, moments, str(tmp_path), NOTHING)[0]
    assert sum(there) == pytest.approx(sum(here), rel=1e-5) and min(there) > 0


def began_again(folder: str, tier: dict[str, Any]) -> tuple[list[float], list[float]]:
    engine = engine_of(folder, tier)
    engine.save_checkpoint(f"{folder}/saved", tag="new")
    first = train(engine, range(3))
    engine.load_checkpoint(f"{folder}/saved", tag="new")
    again = train(engine, range(3))
    engine.destroy()
    return first, again


@pytest.mark.parametrize("tier", [NOTHING, ALL], ids=["memory", "disk"])
def test_loading_a_checkpoint_without_moments_discards_the_present_ones(tier: dict[str, Any], tmp_path: Path) -> None:
    first, again = run_ranks(1, began_again, str(tmp_path), tier)[0]
    assert first == again


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in its groups, and steps less far each time."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] /= 2
        super().step(closure)


def counted(folder: str) -> tuple[list[float], int, list[bool]]:
    model = build()
    given = config(folder, NOTHING, 2)
    del given["optimizer"], given["zero_optimization"]["sub_group_size"]
    engine = shoal.initialize(model=model, config=given, optimizer=Counting(model.parameters(), lr=1.0))[0]
    train(engine, range(3))
    assert engine.sharded is not None and engine.optimizer is not None
    held = [piece.hold is None for piece in weights_to_save(engine.sharded)]
    return engine.get_lr(), len(engine.optimizer.views.views) - len(engine.sharded.trainable), held


def test_an_optimizer_may_keep_its_step_count_in_its_groups(tmp_path: Path) -> None:
    rates, more, held = run_ranks(2, counted, str(tmp_path))[0]
    assert (rates, more) == ([0.125], 0) and all(held)


# Errors before the first step


def refused(folder: str, tier: dict[str, Any]) -> str:
    with pytest.raises(TierError) as raised:
        engine_of(folder, tier)
    return str(raised.value)


def test_a_missing_folder_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for message in run_ranks(2, refused, str(tmp_path / "missing"), ALL):
        assert "rank 0" in message and "rank 1" in message and "missing does not exist" in message


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is not a folder" in run_ranks(1, refused, str(tmp_path / "file"), STATE)[0]


def too_full(folder: str) -> str:
    storage_plan.free_bytes = lambda path: 50_000  # type: ignore[assignment]
    return refused(folder, ALL)


def test_too_little_disk_space_is_refused_with_needed_and_free_bytes(tmp_path: Path) -> None:
    parameters = sum(p.numel() for p in build().parameters())
    for message in run_ranks(2, too_full, str(tmp_path)):
        assert f"{parameters * 16:,} bytes of state are to rest there, and 50,000 are free; make room" in message


def too_full_for_both(folder: str) -> str:
    storage_plan.free_bytes = lambda path: 13 * sum(p.numel() for p in build().parameters())  # type: ignore[assignment]
    tier = {key: {"device": "nvme", "nvme_path": f"{folder}/{key}"} for key in ALL}
    given = config(folder, NOTHING)
    given["zero_optimization"] |= tier
    for key in ALL:
        Path(folder, key).mkdir(exist_ok=True)
    with pytest.raises(TierError) as raised:
        shoal.initialize(model=build(), config=given)
    return str(raised.value)


def test_two_folders_of_one_disk_share_its_space(tmp_path: Path) -> None:
    parameters = sum(p.numel() for p in build().parameters())
    message = run_ranks(1, too_full_for_both, str(tmp_path))[0]
    assert f"{parameters * 16:,} bytes of state are to rest there, and {parameters * 13:,} are free" in message
    assert all(f"{tmp_path}/{key}" in message for key in ALL)


def test_nvme_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="nvme_path"):
        shoal.engine.schema.Config.resolve({"zero_optimization": {"offload_param": {"device": "nvme"}}}, data_ranks=1)


# Errors during training


def harmed(folder: str, harm: str, tier: dict[str, Any]) -> tuple[str, str]:
    engine = engine_of(folder, tier)
    train(engine, range(1))
    file = next(Path(folder).glob(f"shoal-swap-*/rank{engine.global_rank}.swap"))
    match harm:
        case "truncated":
            os.truncate(file, 4096)
        case "changed":
            with file.open("r+b") as there:
                there.write(b"\x55" * file.stat().st_size)
        case _:
            shutil.rmtree(file.parent)
    with pytest.raises(ShoalError) as raised:
        train(engine, range(1, 3))
    if engine.optimizer is not None and engine.optimizer.failed:
        with pytest.raises(TierError, match="a step was taken in part"):
            engine.save_checkpoint(f"{folder}/saved")
    return str(raised.value), str(file)


@pytest.mark.parametrize(("harm", "expected"), [("truncated", "No other process may touch the folder"),
                                                ("changed", "changed on disk"), ("deleted", "deleted")])
def test_a_damaged_swap_file_is_named_in_the_error(harm: str, expected: str, tmp_path: Path) -> None:
    for tier in (ALL, STATE):
        folder = tmp_path / str(len(tier))
        folder.mkdir()
        message, file = run_ranks(1, harmed, str(folder), harm, tier)[0]
        assert expected in message and file in message and "rank 0" in message and "unit '" in message and "byte" in message
        assert any(f"'{name}'" in message for name, _ in build().named_parameters()), message


def two_engines(folder: str) -> tuple[list[float], list[float]]:
    first, second = engine_of(folder, ALL), engine_of(folder, ALL)
    found = [train(first, range(1)), train(second, range(1))]
    found = [found[0] + train(first, range(1, 2)), found[1] + train(second, range(1, 2))]
    first.destroy()
    found[1] += train(second, range(2, 3))
    second.destroy()
    return found[0], found[1]


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    first, second = run_ranks(1, two_engines, str(tmp_path))[0]
    assert second[:2] == first
    assert list(tmp_path.iterdir()) == []


def requests(folder: str) -> tuple[set[int], int]:
    first, second, third = (engine_of(folder, ALL, aio={"block_size": size}) for size in (8192, 16384, 8192))
    swaps = [engine.sharded.storage.swaps for engine in (first, second, third) if engine.sharded is not None]
    assert swaps[0] == swaps[2]
    return {swap.block_bytes for found in swaps for swap in found}, len(list(Path(folder).glob("shoal-swap-*/*.swap")))


def test_engines_with_other_request_sizes_use_separate_files(tmp_path: Path) -> None:
    assert run_ranks(1, requests, str(tmp_path)) == [({8192, 16384}, 2)]


def traced(folder: str) -> set[str]:
    engine = engine_of(folder, ALL)
    train(engine, range(1))
    with engine.trace() as trace:
        train(engine, range(1, 3))
    return {event.lane for event in trace.events}


def test_a_trace_records_compute_reads_writes_and_waits(tmp_path: Path) -> None:
    assert run_ranks(1, traced, str(tmp_path))[0] == {
        "forward", "backward", "wait", "fetch", "step", "commit", "read", "write"}
