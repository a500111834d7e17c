"""Published engines, host optimizers, loaders and checkpoint helpers answer as the published package does."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler, TensorDataset

from shoal.compat.deepspeed.checkpoint.reshape_3d_utils import model_3d_desc
from shoal.compat.deepspeed.checkpoint.reshape_meg_2d import get_mpu_ranks, reshape_meg_2d_parallel
from shoal.compat.deepspeed.checkpoint.reshape_utils import get_zero_files, merge_state, partition_data
from shoal.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from shoal.compat.deepspeed.ops.adam import DeepSpeedCPUAdam
from shoal.compat.deepspeed.ops.lion import DeepSpeedCPULion
from shoal.compat.deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from shoal.compat.deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from shoal.compat.deepspeed.runtime.config import DeepSpeedConfig
from shoal.compat.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from shoal.compat.deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
from shoal.compat.deepspeed.runtime.zero.linear import LinearModuleForZeroStage3
from shoal.compat.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from shoal.compat.deepspeed.utils.torch import required_torch_version
from shoal.compat.engine import DeepSpeedEngine
from shoal.compat.entry import initialize
from shoal.compat.hjson import loads
from shoal.testing import run_ranks

ADAM = {"type": "Adam", "params": {"lr": 0.1}}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def settings(stage: int, **more: Any) -> dict[str, Any]:
    return {"train_batch_size": 2, "optimizer": ADAM, "zero_optimization": {"stage": stage}, **more}


def train(engine: Any) -> float:
    loss = engine(torch.ones(2, 4)).float().square().sum()
    engine.backward(loss)
    engine.step()
    return float(loss)


# Engines


class Mine(DeepSpeedEngine):
    """An engine of a script, which passes the published arguments on."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.steps_of_mine = 0


def engines(folder: str) -> bool:
    """Build engines in all published ways in one process; assert what scripts look at."""
    path = Path(folder) / "ds.json"
    path.write_text(json.dumps(settings(1)))
    by_call = initialize(model=model(), config=settings(1))[0]
    by_args = DeepSpeedEngine(argparse.Namespace(deepspeed_config=str(path)), model())
    by_class = Mine(None, model(), config_class=DeepSpeedConfig(str(path)))
    wanted = [train(by_call) for _ in range(2)]
    assert [train(by_args) for _ in range(2)] == wanted == [train(by_class) for _ in range(2)]
    assert by_class.steps_of_mine == 0
    assert by_class.train_batch_size() == 2
    with pytest.raises(NotImplementedError, match="mesh_device"):
        DeepSpeedEngine(None, model(), config=settings(0), mesh_device=object())
    _contexts(by_class)
    _loading(by_class, folder)
    _loaders(by_class)
    for engine in (by_call, by_args, by_class):
        engine.destroy()
    engine, offload, _, _ = initialize(model=model(), config={"train_batch_size": 2,
                                                                        "zero_optimization": {"stage": 3}})
    assert isinstance(offload, DeepSpeedZeRoOffload)
    offload.partition_all_parameters()
    with torch.no_grad():
        assert engine(torch.ones(2, 4)).shape == (2, 2)
    half = settings(0, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine = initialize(model=model(), config=half)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = model()(torch.ones(2, 4))
    assert torch.equal(engine(torch.ones(2, 4)), expected)
    assert engine(torch.ones(2, 4)).dtype == torch.bfloat16
    train(engine)
    return True


def _contexts(engine: Any) -> None:
    assert not engine.inside_no_sync_ctxt
    with engine.no_sync():
        assert engine.inside_no_sync_ctxt
        with pytest.raises(AssertionError, match="nested"), engine.no_sync():
            pass
    engine.offload_states()  # all of it rests on the host
    engine.reload_states()
    assert engine.dist_backend == "gloo"
    assert engine.postscale_gradients()
    assert engine.checkpoint_serialization_enabled()
    assert not engine.autotuning_enabled()


def _loading(engine: Any, folder: str) -> None:
    """A function of the script's own loads the weights, from a checkpoint and from a state dict."""
    def load(src: dict[str, Tensor], dst: nn.Module) -> None:
        dst.load_state_dict({name: value + 1 for name, value in src.items()})

    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.save_checkpoint(folder, tag="saved")
    path, _ = engine.load_checkpoint(folder, tag="saved", custom_load_fn=load)
    assert path is not None
    loaded = engine.module_state_dict()
    assert all(torch.equal(loaded[name], value + 1) for name, value in before.items())
    engine.load_module_state_dict({"module": before}, custom_load_fn=load)
    assert all(torch.equal(engine.module_state_dict()[name], value + 1) for name, value in before.items())
    assert isinstance(engine.checkpoint_engine, CheckpointEngine)


def _loaders(engine: Any) -> None:
    numbers = TensorDataset(torch.arange(6.0))
    assert isinstance(engine.deepspeed_io(numbers), DeepSpeedDataLoader)
    sampled = engine.deepspeed_io(numbers, data_sampler=SequentialSampler(numbers))
    assert [batch[0].tolist() for batch in sampled] == [[0, 1], [2, 3], [4, 5]]
    assert len(sampled) == sampled.len == 3


def test_engines_are_built_by_published_constructors(tmp_path: Path) -> None:
    assert run_ranks(1, engines, str(tmp_path)) == [True]


# Optimizers without an engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion])
def test_host_optimizers_step_16_bit_weights_in_fp32(kind: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5).to(dtype))
    wide = nn.Parameter(weight.detach().float())
    narrow_optimizer, wide_optimizer = kind([weight], lr=0.1), kind([wide], lr=0.1)
    for step in range(3):
        gradient = torch.linspace(-1, 2, 5).add(step).to(dtype)
        weight.grad, wide.grad = gradient.clone(), gradient.float()
        narrow_optimizer.step()
        wide_optimizer.step()
        wide.data = wide.data.to(dtype).float()
        assert torch.equal(weight, wide.to(dtype))
        assert weight.grad.dtype == dtype
    state = [value for value in narrow_optimizer.state[weight].values() if isinstance(value, Tensor) and value.ndim]
    assert state
    assert all(value.dtype == torch.float32 for value in state)


def handed_host_optimizers() -> None:
    for kind in (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion):
        for stage in (0, 2, 3):
            trained: list[Tensor] = []
            for given in (torch.bfloat16, torch.float32):
                whole = model().bfloat16().to(given)
                optimizer = kind(whole.parameters(), lr=0.01)
                engine = initialize(model=whole, optimizer=optimizer, config={
                    "train_batch_size": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}})[0]
                for _ in range(2):
                    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean())
                    engine.step()
                trained.append(torch.cat([value.flatten() for value in engine.consolidated_state_dict().values()]))
            assert trained[0].any() and torch.equal(*trained)


def test_host_optimizers_over_16_bit_weights_are_taken_over() -> None:
    run_ranks(1, handed_host_optimizers)


# Configuration


def test_numbers_end_before_a_comment_and_an_empty_file_has_no_keys() -> None:
    assert loads("{size: 2 // two\n rate: 0.5 /* half */\n text: a // b\n}") == {"size": 2, "rate": 0.5, "text": "a // b"}
    assert loads("") == {}


def test_no_accumulation_steps_are_an_error() -> None:
    with pytest.raises(AssertionError, match="it must be 1 or more"):
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 0})


def test_the_checkpoint_section_has_its_defaults_and_checks_its_choices() -> None:
    assert get_checkpoint_config({}) == {"tag_validation": "WARN", "checkpoint_serialization": True, "writer": None}
    found = get_checkpoint_config({"checkpoint": {"tag_validation": "fail", "writer": {"type": "fast"}}})
    assert (found["tag_validation"], found["writer"]["type"], found["writer"]["io_multiplier"]) == ("FAIL", "FAST", 1)
    for wrong in ({"tag_validation": "x"}, {"writer": {"type": "x"}}):
        with pytest.raises(AssertionError, match="choose one of"):
            get_checkpoint_config({"checkpoint": wrong})


# Checkpoint helpers


def test_a_grid_of_ranks_shrinks_in_order() -> None:
    assert reshape_meg_2d_parallel(2, 2, 2, 1).map == {"0,0": [0, 1], "1,0": [2, 3]}
    assert reshape_meg_2d_parallel(2, 2, 1, 2).map == {"0,0": [0, 2], "0,1": [1, 3]}
    assert reshape_meg_2d_parallel(2, 4, 1, 1).get_data() == list(range(8))
    with pytest.raises(AssertionError, match="cannot grow"):
        reshape_meg_2d_parallel(2, 2, 4, 2)
    assert get_mpu_ranks(2, 2, 2) == (
        [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 1, 4, 5], [2, 3, 6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]])


def test_a_grid_of_three_axes_is_divided_over_the_new_data_ranks() -> None:
    grid = model_3d_desc(2, 2, 2)
    assert grid.get_desc() == "PP,TP,DP = (2, 2, 2)"
    assert grid.is_valid(2, 0, 0) == (False, ["PP indexing error: index 2 >= degree 2"])
    assert [new.map for new in grid.reshape(model_3d_desc(1, 2, 2))] == [
        {"0,0": [0, 4], "0,1": [1, 5]}, {"0,0": [2, 6], "0,1": [3, 7]}]
    assert grid.can_reshape(model_3d_desc(4, 1, 1)) == (False, ["Expansion reshape not supported - PP: 2 ---> 4"])
    with pytest.raises(AssertionError, match="Expansion"):
        grid.reshape(model_3d_desc(2, 2, 4))


def test_states_of_ranks_are_joined_by_elements(tmp_path: Path) -> None:
    joined = merge_state({"a": 1, "b": {"c": torch.ones(2)}}, {"a": 2, "b": {"c": torch.zeros(1)}})
    assert joined["a"] == 1
    assert joined["b"]["c"].tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="lists of 1 and 2"):
        merge_state([1], [1, 2])
    assert partition_data([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    for rank in (10, 0, 1):
        (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    assert [Path(path).name.split("_")[3] for path in get_zero_files(str(tmp_path))] == ["0", "1", "10"]


def test_a_checkpoint_engine_writes_and_reads_files(tmp_path: Path) -> None:
    engine, info = TorchCheckpointEngine(), CheckpointCommitInfo(tag="a", save_dir=str(tmp_path), save_latest=True)
    engine.create(info)
    engine.save({"weight": torch.ones(2)}, str(tmp_path / "a.pt"))
    assert torch.equal(engine.load(str(tmp_path / "a.pt"))["weight"], torch.ones(2))
    assert engine.commit(info)
    assert [engine.is_data_parallel_writer(rank) for rank in range(2)] == [True, False]


def test_the_norm_of_a_skipped_step_is_infinite() -> None:
    engine, *_ = initialize(model=model(), config={"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": ADAM})
    for factor in (torch.nan, 1.0):
        engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum() * factor)
        engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None and (norm == torch.inf) == (engine.skipped_steps == engine.global_steps)
    assert engine.skipped_steps == 1


# Modules and versions


def test_the_linear_layer_of_stage_3_computes_what_torch_does() -> None:
    layer = LinearModuleForZeroStage3(4, 3)
    sample = torch.randn(2, 4)
    assert torch.equal(layer(sample), nn.functional.linear(sample, layer.weight, layer.bias))
    assert not isinstance(layer, nn.Linear)
    assert LinearModuleForZeroStage3(4, 3, bias=False).bias is None


def test_versions_of_torch_are_compared_by_numbers() -> None:
    assert required_torch_version(1.1)
    assert not required_torch_version(max_version=1.1)
    assert not required_torch_version(min_version="9.9")
    with pytest.raises(AssertionError, match="min_version"):
        required_torch_version()
