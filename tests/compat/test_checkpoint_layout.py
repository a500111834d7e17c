"""Published engines save DeepSpeed's files beside Shoal's, return what DeepSpeed's loads return, and load either."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shoal
from shoal.interchange.archive import load_archive
from shoal.testing import run_ranks

MODELS = {1: "mp_rank_00_model_states.pt", 3: "zero_pp_rank_{rank}_mp_rank_00_model_states.pt"}
INTERNAL = {"module", "lr_scheduler", "global_steps", "skipped_steps", "dp_world_size", "mp_world_size"}


def build(stage: int, **checkpoint: Any) -> Any:
    deepspeed: Any = importlib.import_module("shoal.compat.deepspeed")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    engine, *_ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": stage == 1},
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "checkpoint": checkpoint})
    return engine


def step(engine: Any) -> float:
    x = torch.full((1, 3), 1.0 + dist.get_rank(), dtype=engine.get_data_types()[0])
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def save_and_resume(folder: str, stage: int) -> None:
    rank = dist.get_rank()
    engine = build(stage)
    step(engine)
    assert engine.save_checkpoint(folder, client_state={"epoch": 3})
    saved = Path(folder) / "global_step1"
    prefix = "bf16_" if stage == 1 else ""
    assert {file.name for file in saved.glob("*.pt")} == {
        *(MODELS[stage].format(rank=each) for each in range(2)),
        *(f"{prefix}zero_pp_rank_{each}_mp_rank_00_optim_states.pt" for each in range(2))}
    expected = [step(engine) for _ in range(2)]

    other = build(stage)
    path, client = other.load_checkpoint(folder)
    assert path == str(saved / MODELS[stage].format(rank=rank)) and client["epoch"] == 3
    assert client.keys() == load_archive(Path(path)).keys() - INTERNAL - {"optimizer", "data_sampler", "random_ltd"}
    assert [step(other) for _ in range(2)] == expected
    del client["checkpoint_parallel_dimensions"]  # as published, no save takes this key
    other.save_checkpoint(folder, tag="again", client_state=client)

    dist.barrier()
    if rank == 0:
        for file in (*saved.glob("*.json"), *saved.glob("*.safetensors")):
            file.unlink()
    dist.barrier()
    alone = build(stage)
    assert alone.load_checkpoint(folder, tag="global_step1")[1]["epoch"] == 3
    assert [step(alone) for _ in range(2)] == expected


def test_a_training_resumes_from_the_files_of_either_layout(tmp_path: Path) -> None:
    for stage in (1, 3):
        run_ranks(2, save_and_resume, str(tmp_path / str(stage)), stage)


def save_native_files_alone(folder: str) -> None:
    engine = build(2, layout="shoal")
    engine.save_checkpoint(folder, tag="own", client_state={"epoch": 3})
    assert not [*Path(folder).glob("*/*.pt")]
    path, client = engine.load_checkpoint(folder)
    assert (path, client) == (f"{folder}/own", {"epoch": 3})


def test_the_layout_of_shoal_alone_can_be_asked_for(tmp_path: Path) -> None:
    run_ranks(1, save_native_files_alone, str(tmp_path))


def save_a_model_in_fp64(folder: str) -> torch.dtype:
    """Save a model in fp64; return the dtype of its weights in the file of DeepSpeed's layout."""
    engine, *_ = shoal.initialize(model=nn.Linear(3, 5).double(), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "checkpoint": {"layout": "deepspeed"}})
    engine.backward(engine(torch.ones(1, 3, dtype=torch.float64)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, tag="one")
    engine.wait_for_checkpoint()
    return load_archive(Path(folder) / "one" / MODELS[1])["module"]["weight"].dtype


def test_saved_weights_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    assert run_ranks(1, save_a_model_in_fp64, str(tmp_path)) == [torch.float64]
