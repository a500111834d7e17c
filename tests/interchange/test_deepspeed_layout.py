"""DeepSpeed's layouts are read and written by a table of facts: which elements of which parameter a rank's file holds."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.checkpoint import Piece, read, write
from shoal.errors import CheckpointError
from shoal.interchange import open_checkpoint
from shoal.interchange.archive import Opaque, load_archive
from shoal.interchange.writer import Target, write_folder
from shoal.testing import run_ranks

A, B = torch.tensor([0.0, 1, 2]), torch.tensor([[3.0, 4], [5, 6]])
FROZEN = torch.tensor([7.0, 8, 9])
WEIGHTS = {"a": A, "b": B, "frozen": FROZEN}

FLAT = {1: [[0, 1, 2, 3], [4, 5, 6]], 2: [[0, 1, 2, 3], [4, 5, 6]], 3: [[0, 1, 3, 4], [2, 0, 5, 6]]}
"""The master of each of two ranks, for `a` and `b` in one group: at stages 1 and 2 without the padding at the end."""
FROZEN_SLICES = [[7, 8], [9, 0]]
"""The slices of `frozen` at stage 3."""


def moment(values: list[int]) -> Tensor:
    """Return the moment of a master, so that each element tells where it belongs."""
    return torch.tensor(values, dtype=torch.float32) + 10


def published(folder: Path, stage: int, *, mapped: bool = False) -> Path:
    """Write the files of two ranks as the table says, with the keys of the reference, and return the folder."""
    path = folder / "step5"
    path.mkdir(parents=True)
    (folder / "latest").write_text("step5")
    shapes = OrderedDict(a=torch.Size([3]), b=torch.Size([2, 2]))
    model: dict[str, Any] = {
        "buffer_names": ["buffer"], "optimizer": None, "param_shapes": [shapes], "shared_params": {"alias": "a"},
        "lr_scheduler": {"last_batch_iteration": 4}, "global_steps": 5, "skipped_steps": 1, "global_samples": 40,
        "dp_world_size": 2, "mp_world_size": 1, "ds_config": {}, "ds_version": "0.19.8", "epoch": 3}
    whole = OrderedDict({"buffer": torch.ones(1), **WEIGHTS, "alias": A})
    for rank in range(2):
        master = torch.tensor(FLAT[stage][rank], dtype=torch.float32)
        padded = FLAT[stage][rank] + [0] * (4 - len(FLAT[stage][rank]))
        base = {"state": {0: {"step": torch.tensor(5.0), "exp_avg": moment(padded)}},
                "param_groups": [{"lr": 0.25, "betas": (0.5, 0.75), "fused": True, "params": [0]}]}
        if stage == 3:
            state: dict[str, Any] = {"zero_stage": 3, "partition_count": 2, "optimizer_state_dict": base,
                                     "fp32_flat_groups": [master]}
            own = {**model, "module": OrderedDict((name, value if name == "buffer" else torch.empty(0))
                                                  for name, value in whole.items()),
                   "frozen_param_shapes": {"frozen": torch.Size([3])},
                   "frozen_param_fragments": {"frozen": torch.tensor(FROZEN_SLICES[rank], dtype=torch.float32)}}
            torch.save(own, path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        else:
            state = {"zero_stage": stage, "partition_count": [2], "base_optimizer_state": base,
                     "single_partition_of_fp32_groups": [master]}
            if mapped:
                state["param_slice_mappings"] = [[{"a": {"start": 0, "numel": 3}, "b": {"start": 3, "numel": 1}},
                                                  {"b": {"start": 0, "numel": 3}}][rank]]
            torch.save({**model, "module": whole}, path / "mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": state}, path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return path


@pytest.mark.parametrize(("stage", "mapped"), [(1, False), (2, True), (3, False)])
def test_a_folder_is_read_as_whole_tensors_by_name(tmp_path: Path, stage: int, mapped: bool) -> None:
    published(tmp_path, stage, mapped=mapped)
    with open_checkpoint(tmp_path) as snapshot:
        for name, value in WEIGHTS.items():
            assert torch.equal(snapshot.tensor(f"weight/{name}"), value), name
        assert torch.equal(snapshot.tensor("exp_avg/a"), A + 10)
        assert torch.equal(snapshot.tensor("exp_avg/b"), B + 10)
        assert snapshot.tensor("scalar.step/b").item() == 5
        assert torch.equal(snapshot.tensor("buffer/buffer"), torch.ones(1))
        assert "exp_avg/frozen" not in snapshot and "weight/alias" not in snapshot
        shared = snapshot.shared
        assert (snapshot.step, snapshot.ranks, shared["tied"]) == (5, 2, {"alias": "a"})
        assert (shared["client_state"], shared["skipped_steps"]) == ({"epoch": 3}, 1)
        assert shared["groups"] == [{"lr": 0.25, "betas": (0.5, 0.75)}]
        assert shared["lr_scheduler"] == {"last_batch_iteration": 4}


def native(folder: Path, optimizer: str = "AdamW") -> None:
    """Write the same training in Shoal's format."""
    tensors = {**{f"weight/{name}": value for name, value in WEIGHTS.items()}, "exp_avg/a": A + 10, "exp_avg/b": B + 10,
               "scalar.step/a": torch.tensor(5.0), "scalar.step/b": torch.tensor(5.0), "buffer/buffer": torch.ones(1)}
    pieces = [Piece(name=name, shape=tuple(value.shape), start=0, stop=value.numel(), data=value.reshape(-1))
              for name, value in tensors.items()]
    write(folder, "step5", pieces, step=5, shared={
        "global_steps": 5, "global_samples": 40, "skipped_steps": 1, "tied": {"alias": "a"}, "group_names": [["a", "b"]],
        "groups": [{"lr": 0.25, "betas": (0.5, 0.75), "fused": True}], "client_state": {"epoch": 3}, "loss_scale": {},
        "lr_scheduler": {"last_batch_iteration": 4}, "optimizer": optimizer,
        "parameters": {"a": [3], "b": [2, 2], "frozen": [3]}})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_written_folder_holds_what_the_table_says(tmp_path: Path, stage: int) -> None:
    native(tmp_path / "shoal")
    with read(tmp_path / "shoal") as snapshot:
        path = write_folder(snapshot, tmp_path / "out", "step5", Target(stage=stage, ranks=2, dtype=torch.bfloat16))
    assert (tmp_path / "out" / "latest").read_text() == "step5"
    for rank in range(2):
        state = load_archive(path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        base = state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        masters = state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
        assert masters[0].tolist() == FLAT[stage][rank]
        padding = 4 - len(FLAT[stage][rank])
        assert base["state"][0]["exp_avg"][:4 - padding].tolist() == [
            0 if stage == 3 and rank == 1 and place == 1 else value + 10 for place, value in enumerate(FLAT[stage][rank])]
        assert base["state"][0]["step"].item() == 5
        assert base["param_groups"][0]["lr"] == 0.25
    model = load_archive(path / f"{'zero_pp_rank_1_' if stage == 3 else ''}mp_rank_00_model_states.pt")
    assert model["param_shapes"] == [{"a": (3,), "b": (2, 2)}]
    assert (model["global_steps"], model["epoch"]) == (5, 3)
    if stage == 3:
        assert model["frozen_param_fragments"]["frozen"].tolist() == FROZEN_SLICES[1]
        assert model["module"]["a"].shape == (0,)
    else:
        assert torch.equal(model["module"]["b"], B.bfloat16())


def test_stage_0_is_written_as_the_optimizer_of_torch_saves(tmp_path: Path) -> None:
    native(tmp_path / "shoal")
    with read(tmp_path / "shoal") as snapshot:
        path = write_folder(snapshot, tmp_path / "out", "step5", Target(stage=0, ranks=2))
    with open_checkpoint(tmp_path / "out", groups=[["a", "b"]]) as snapshot:
        assert torch.equal(snapshot.tensor("exp_avg/b"), B + 10)
        assert torch.equal(snapshot.tensor("weight/frozen"), FROZEN)
    parameters = [nn.Parameter(A.clone()), nn.Parameter(B.clone())]
    optimizer = torch.optim.AdamW(parameters)
    optimizer.load_state_dict(torch.load(path / "mp_rank_00_model_states.pt", weights_only=True)["optimizer"])
    assert torch.equal(optimizer.state[parameters[1]]["exp_avg"], B + 10)


@pytest.mark.parametrize(("optimizer", "key"), [("AdamW", "fp32_groups_flat"), ("SGD", "fp32_groups")])
def test_stage_0_in_16_bits_keeps_the_masters_beside_the_weights(tmp_path: Path, optimizer: str, key: str) -> None:
    native(tmp_path / "shoal", optimizer)
    with read(tmp_path / "shoal") as snapshot:
        path = write_folder(snapshot, tmp_path / "out", "step5", Target(stage=0, ranks=2, dtype=torch.bfloat16))
    state = load_archive(path / "mp_rank_00_model_states.pt")
    assert key in state["optimizer"] and state["module"]["b"].dtype == torch.bfloat16
    with open_checkpoint(tmp_path / "out", groups=[["a", "b"]]) as snapshot:
        assert snapshot.dtype("weight/b") == torch.float32
        assert torch.equal(snapshot.tensor("exp_avg/b"), B + 10)


def test_a_group_takes_the_largest_step_count_of_its_parameters(tmp_path: Path) -> None:
    """DeepSpeed's own Adam leaves 0 in the state of every parameter but the last."""
    native(tmp_path / "shoal")
    with read(tmp_path / "shoal") as snapshot:
        path = write_folder(snapshot, tmp_path / "out", "step5", Target(stage=0, ranks=1)) / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    for number, steps in enumerate([0, 5]):
        model["optimizer"]["state"][number]["step"] = steps
    model["optimizer"]["param_groups"][0]["step"] = 0
    torch.save(model, path)
    with open_checkpoint(tmp_path / "out", groups=[["a", "b"]]) as snapshot:
        assert [float(snapshot.tensor(f"scalar.step/{name}")) for name in "ab"] == [5, 5]


@pytest.mark.parametrize(("name", "message"), [
    ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "data rank 0 of model rank 0 is missing"),
    ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "optimizer files of 1 data ranks, and 2 have saved"),
])  # fmt: skip
def test_a_missing_file_is_named(tmp_path: Path, name: str, message: str) -> None:
    (published(tmp_path, 2) / name).unlink()
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = published(tmp_path, 2) / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"rank_1_mp_rank_00_optim_states.pt: damaged"):
        open_checkpoint(tmp_path)


def test_parts_of_tensor_parallel_layers_are_refused(tmp_path: Path) -> None:
    (published(tmp_path, 2) / "layer_00-model_01-model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="ds_to_universal"):
        open_checkpoint(tmp_path)


# Files of torch.save


class Unknown:
    """An object of a class that the reader does not know."""

    def __init__(self) -> None:
        self.depth = 3


class Harmful:
    """Unpickling this runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_objects_of_unknown_classes_become_records(tmp_path: Path) -> None:
    torch.save({"object": Unknown(), "again": [1.5, None, True, b"x", {"k": (1,)}, {2}]}, tmp_path / "file.pt")
    loaded = load_archive(tmp_path / "file.pt")
    record = loaded["object"]
    assert isinstance(record, Opaque)
    assert (record.name.endswith("Unknown"), record.attribute("depth")) == (True, 3)
    assert loaded["again"] == [1.5, None, True, b"x", {"k": (1,)}, {2}]


def test_nothing_that_a_file_names_is_called(tmp_path: Path) -> None:
    torch.save({"trap": Harmful(f"touch {tmp_path}/ran"), "x": torch.ones(2)}, tmp_path / "file.pt")
    loaded = load_archive(tmp_path / "file.pt")
    assert loaded["trap"].name == "posix.system"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint16])
def test_tensors_keep_dtype_shape_and_strides(tmp_path: Path, dtype: torch.dtype) -> None:
    base = torch.arange(24).reshape(4, 6).to(dtype)
    tensors = {"whole": base, "part": base[1:, ::2], "turned": base.t(), "number": base[0, 1], "empty": base[:0],
               "parameter": nn.Parameter(base[2].float())}
    torch.save(tensors, tmp_path / "file.pt")
    for name, tensor in load_archive(tmp_path / "file.pt").items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name].detach()), name


def test_a_file_of_the_old_format_is_refused_by_name(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"old.pt: damaged, or written by torch before 1.6"):
        load_archive(tmp_path / "old.pt")


# The engine


def train(folder: str) -> tuple[list[float], list[float]]:
    """Train, save in DeepSpeed's layout at another stage, and train on here and from there."""
    torch.manual_seed(0)
    first, second = (nn.Linear(5, 3) for _ in range(2))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine, *_ = shoal.initialize(model=first, config={**config, "zero_optimization": {"stage": 2}})

    def step(trained: Any, number: int) -> float:
        x = torch.randn(2, 5, generator=torch.Generator().manual_seed(number))
        loss = trained(x).square().mean()
        trained.backward(loss)
        trained.step()
        return float(loss)

    step(engine, 0)
    engine.save_checkpoint(f"{folder}/shoal", client_state={"epoch": 1})
    engine.wait_for_checkpoint()
    rank = torch.distributed.get_rank()
    if rank == 0:
        with read(f"{folder}/shoal") as snapshot:
            write_folder(snapshot, f"{folder}/deepspeed", "global_step1", Target(stage=3, ranks=3))
    torch.distributed.barrier()
    other, *_ = shoal.initialize(model=second, config={**config, "zero_optimization": {"stage": 1}})
    path, client = other.load_checkpoint(f"{folder}/deepspeed")
    assert path is not None and client == {"epoch": 1} and other.global_steps == 1
    return [step(engine, number) for number in (1, 2)], [step(other, number) for number in (1, 2)]


def test_an_engine_loads_a_folder_of_deepspeed_at_another_size(tmp_path: Path) -> None:
    for here, there in run_ranks(2, train, str(tmp_path)):
        assert here == there
