"""Published monitors, lists of cores, accelerators, and constants."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.compat.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from shoal.compat.deepspeed.monitor.config import get_monitor_config
from shoal.compat.deepspeed.monitor.monitor import MonitorMaster
from shoal.compat.deepspeed.utils import zero_to_fp32
from shoal.compat.deepspeed.utils.numa import get_numactl_cmd, parse_range, parse_range_list
from shoal.testing import run_ranks


def csv_config(folder: Path | str) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}}


def test_events_are_rows_of_a_file_for_each_tag(tmp_path: Path) -> None:
    master = MonitorMaster(get_monitor_config(csv_config(tmp_path)))
    assert master.enabled and master.tb_monitor is None
    master.write_events([("Train/Samples/loss", torch.tensor(1.5), 3), ("lr", 0.25, 3)])
    master.write_events([("Train/Samples/loss", 1.25, 4)])
    assert (tmp_path / "job" / "Train_Samples_loss.csv").read_text() == "step,loss\n3,1.5\n4,1.25\n"
    assert (tmp_path / "job" / "lr.csv").read_text() == "step,lr\n3,0.25\n"
    silent = MonitorMaster(get_monitor_config({}))
    assert not silent.enabled and silent.csv_monitor is None
    silent.write_events([("lr", 0.25, 3)])


def train(folder: str) -> bool:
    deepspeed: Any = import_module("shoal.compat.deepspeed")
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, **csv_config(folder),
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}}})
    for _ in range(4):
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    assert (engine.monitor.csv_monitor is None) == (engine.global_rank > 0)
    return engine.monitor.enabled


def test_an_engine_reports_each_step_from_rank_0(tmp_path: Path) -> None:
    assert run_ranks(2, train, str(tmp_path)) == [True, True]
    assert (tmp_path / "job" / "Train_Samples_lr.csv").read_text() == "step,lr\n4,0.5\n8,0.5\n"


def test_constants_are_names_of_the_configuration_module_too() -> None:
    config: Any = import_module("shoal.compat.deepspeed.runtime.config")
    assert (config.GRADIENT_CLIPPING, config.FP16_MIN_LOSS_SCALE_DEFAULT) == ("gradient_clipping", 1)
    assert config.STEPS_PER_PRINT_DEFAULT is None
    with pytest.raises(AttributeError, match="NOTHING"):
        _ = config.NOTHING


def test_lists_of_cores_ascend_and_are_shared_evenly() -> None:
    assert list(parse_range("3-5")) == [3, 4, 5] and list(parse_range("7")) == [7]
    assert parse_range_list("0-2,5") == [0, 1, 2, 5]
    assert get_numactl_cmd("0-7", 2, 1) == (4, ["numactl", "-C", "4-7"])
    for wrong in ("5-3", "", "1-2-3", "a", "3,1", "1-3,2-4"):
        with pytest.raises(ValueError, match=r"Bad range|invalid literal"):
            parse_range_list(wrong)
    with pytest.raises(ValueError, match="give at least one"):
        get_numactl_cmd("0-1", 4, 0)


def test_accelerators_give_memory_and_graphs_as_published() -> None:
    accelerator = CPU_Accelerator()
    assert accelerator.pin_empty(2, 3, dtype=torch.float16).shape == accelerator.pin_empty((2, 3), dtype=torch.int8).shape
    assert accelerator.pin_empty_like(torch.ones(2, 2)).dtype == torch.float32
    assert not accelerator.register_host_memory(0, 8)
    with accelerator.capture_to_graph(accelerator.create_graph()):
        accelerator.replay_graph(None)


def test_keys_of_the_files_are_names_of_zero_to_fp32_too() -> None:
    assert (zero_to_fp32.DS_VERSION, zero_to_fp32.ZERO_STAGE) == ("ds_version", "zero_stage")
    assert zero_to_fp32.natural_keys("rank_12") == ["rank_", 12, ""]
    assert zero_to_fp32.zero3_partitioned_param_info(10, 4) == (3, 2)
    with pytest.raises(FileNotFoundError, match="can't find"):
        zero_to_fp32.get_optim_files(str(Path(__file__).parent))
    with pytest.raises(FileNotFoundError, match="doesn't exist"):
        zero_to_fp32.get_model_state_file("nowhere", 1)
