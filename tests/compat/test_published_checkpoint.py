"""`DeepSpeedCheckpoint` and `ZeROCheckpoint` read what Shoal writes in the published layout, and layers of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal.compat.deepspeed as deepspeed
from shoal.compat.deepspeed.checkpoint import DeepSpeedCheckpoint, ZeROCheckpoint, model_3d_desc
from shoal.compat.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from shoal.errors import CheckpointError, NotSupportedYet
from shoal.testing import run_ranks

STEPS = 2


def save(folder: str, stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    engine: Any = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage}})[0]
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
    engine.save_checkpoint(folder, client_state={"iteration": 7, "args": {"heads": 2}})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tag, which two ranks wrote at stage 1."""
    path = tmp_path_factory.mktemp("saved")
    run_ranks(2, save, str(path), 1)
    return path / f"global_step{STEPS}"


def by_name(state: dict[str, Any], flat: Tensor) -> dict[str, Tensor]:
    """Return the slices of a flat group by name."""
    slices = state["optimizer_state_dict"]["param_slice_mappings"][0]
    return {name: flat[place.start:place.start + place.numel] for name, place in slices.items()}


def test_the_ranks_of_a_checkpoint_hold_slices_of_the_masters(folder: Path) -> None:
    found = ZeROCheckpoint(str(folder))
    assert [found.get_src_world_size(), found.get_src_dp_degree(), found.get_src_pp_degree()] == [2, 2, 1]
    whole = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent))
    parts: dict[str, list[Tensor]] = {}
    for rank in range(2):
        assert found.get_files_for_rank(0, 0, rank) == [found.file_list[rank]]
        state = found.get_state_for_rank(0, 0, rank)
        masters = state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
        moment = state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
        assert moment.shape == masters.shape  # without padding
        for name, values in by_name(state, masters).items():
            parts.setdefault(name, []).append(values)
    assert {name: torch.cat(values).tolist() for name, values in parts.items()} == {
        name: values.flatten().tolist() for name, values in whole.items()}


def test_one_rank_reads_what_two_wrote(folder: Path) -> None:
    found = DeepSpeedCheckpoint(str(folder), tp_degree=1, pp_degree=1, dp_degree=1)
    assert [found.is_change_tp_degree(), found.is_change_pp_degree(), found.is_change_dp_degree()] == [False, False, True]
    state = found.get_zero_checkpoint_state(0, 0, 0)
    inner = state["optimizer_state_dict"]
    whole = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent))
    masters = by_name(state, inner["single_partition_of_fp32_groups"][0])
    assert {name: values.tolist() for name, values in masters.items()} == {
        name: values.flatten().tolist() for name, values in whole.items()}
    moments = inner["base_optimizer_state"]["state"][0]
    assert moments["exp_avg"].numel() == sum(values.numel() for values in whole.values())
    assert [float(moments["step"]), inner["partition_count"], inner["group_paddings"]] == [STEPS, [1], [0]]
    assert [found.get_iteration(), found.get_args(), found.get_checkpoint_info("iteration")] == [7, {"heads": 2}, 7]
    module = found.get_2d_parallel_state(tp_index=0, pp_index=0)["module"]
    torch.testing.assert_close(module, whole)
    with pytest.raises(AssertionError, match="1 data ranks"):
        found.get_zero_files(0, 0, 1)
    with pytest.raises(AssertionError, match="get_2d_parallel_state"):
        found.get_embedding_state(0)
    with pytest.raises(AssertionError, match="cannot grow"):
        DeepSpeedCheckpoint(str(folder), tp_degree=2)


def test_a_folder_without_what_is_read_says_what_to_do(tmp_path: Path, folder: Path) -> None:
    run_ranks(1, save, str(tmp_path), 3)
    for kind in (ZeROCheckpoint, DeepSpeedCheckpoint):
        with pytest.raises(CheckpointError, match="convert DIR OUT --stage 1"):
            kind(str(tmp_path / f"global_step{STEPS}"))
        with pytest.raises(CheckpointError, match="folder of a tag"):
            kind(str(folder.parent))
        with pytest.raises(AssertionError, match="does not exist"):
            kind(str(tmp_path / "nowhere"))


def test_layers_of_a_pipeline_are_read_by_fewer_stages(tmp_path: Path) -> None:
    for layer in range(5):
        torch.save({"weight": torch.full((2,), float(layer))}, tmp_path / f"layer_{layer:02d}-model_00-model_states.pt")
    for stage in range(2):
        torch.save({"module": None, "iteration": None}, tmp_path / f"mp_rank_{stage:02d}_model_states.pt")
        inner = {"base_optimizer_state": {"state": {}}, "partition_count": 1}
        torch.save({"optimizer_state_dict": inner}, tmp_path / f"zero_pp_rank_0_mp_rank_{stage:02d}_optim_states.pt")
    found = DeepSpeedCheckpoint(str(tmp_path))
    assert [found.get_pp_transformer_map(stage) for stage in range(2)] == [["layer_01"], ["layer_02", "layer_03"]]
    one = DeepSpeedCheckpoint(str(tmp_path), pp_degree=1)
    assert [float(state["weight"][0]) for state in one.get_transformer_state(0, 0)] == [1.0, 2.0, 3.0]
    assert [float(one.get_embedding_state(0)["weight"][0]), float(one.get_final_norm_state(0)["weight"][0])] == [0.0, 4.0]
    assert one.get_zero_files(0, 0, 0) == one.zero_checkpoint.file_list
    assert one.get_iteration() == 0
    with pytest.raises(NotSupportedYet, match="read them by as many"):
        DeepSpeedCheckpoint(str(tmp_path), tp_degree=2)
    one.zero_checkpoint.reshape(model_3d_desc(2, 1, 1))
    assert len(one.get_zero_files(1, 0, 0)) == 1
