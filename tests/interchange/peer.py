"""Train with the real DeepSpeed on the ranks of this machine; save, or load what Shoal wrote, and print the losses.

    PYTHON peer.py save FOLDER fp32-3 ...     trains, saves FOLDER/fp32-3, trains on; writes losses.json there
    PYTHON peer.py load FOLDER fp32-3 ...     loads FOLDER/fp32-3, trains on; writes back.json there
    PYTHON peer.py weights FOLDER fp32-3 ...  writes FOLDER/fp32-3/weights.pt by DeepSpeed's zero_to_fp32

A case is dtype-stage; `pipe-` before it is a pipeline of two stages, and `-universal` after it the universal form.

It runs in the environment of `make peers`, with the variables of one rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # pyright: ignore[reportMissingImports]
from trained import AFTER, BEFORE, CLIENT, Net, batch, config, groups, microbatches, pipeline_config, pipeline_layers


def run(action: str, folder: Path, case: str) -> None:
    if case.startswith("pipe-"):
        run_pipeline(folder, case)
        return
    dtype, stage, *form = case.split("-")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    settings = {**config(int(stage), dtype), "train_micro_batch_size_per_gpu": 8 // ranks,
                "checkpoint": {"load_universal": bool(form)}}
    net = Net(seed=0 if action == "save" else 1)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=groups(net), config=settings)
    losses: list[float] = []

    def step(number: int) -> None:
        loss = engine(*batch(number, rank, ranks, dtype))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)

    if action == "save":
        for number in range(BEFORE):
            step(number)
        engine.save_checkpoint(str(folder / case), client_state={
            **CLIENT, "universal_checkpoint_info": {"universal_checkpoint_version": 0.4}})
        losses.clear()
    else:
        path, client = engine.load_checkpoint(str(folder / case))
        assert path is not None and client["epoch"] == CLIENT["epoch"]
    for number in range(BEFORE, BEFORE + AFTER):
        step(number)
    if rank == 0:
        (folder / case / ("losses.json" if action == "save" else "back.json")).write_text(json.dumps(losses))
        if action == "save" and stage in "23":
            to_universal(folder / case)


def run_pipeline(folder: Path, case: str) -> None:
    _, dtype, stage = case.split("-")
    torch.manual_seed(0)
    net = PipelineModule(pipeline_layers(LayerSpec, TiedLayerSpec), num_stages=2, loss_fn=torch.nn.MSELoss(),
                         partition_method="uniform")
    settings = {key: value for key, value in pipeline_config(int(stage), dtype).items() if value != {}}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=[*net.parameters()], config=settings)
    batches = microbatches(0, dtype)
    for _ in range(BEFORE):
        engine.train_batch(batches)
    engine.save_checkpoint(str(folder / case), client_state=CLIENT)
    losses = [float(engine.train_batch(batches)) for _ in range(AFTER)]
    if dist.get_rank() == 0:
        (folder / case / "losses.json").write_text(json.dumps(losses))


def save_weights(folder: Path, case: str) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # pyright: ignore

    torch.save({**get_fp32_state_dict_from_zero_checkpoint(str(folder / case))}, folder / case / "weights.pt")


def to_universal(folder: Path) -> None:
    from argparse import Namespace

    from deepspeed.checkpoint.ds_to_universal import main  # pyright: ignore[reportMissingImports]

    source = folder / f"global_step{BEFORE}"
    with contextlib.redirect_stdout(None):
        main(Namespace(input_folder=str(source), output_folder=f"{folder}-universal/{source.name}_universal",
                       num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
                       inject_missing_state=False))


if __name__ == "__main__":
    deepspeed.init_distributed("gloo", verbose=False)
    for name in sys.argv[3:]:
        if sys.argv[1] == "weights":
            save_weights(Path(sys.argv[2]), name)
        else:
            run(sys.argv[1], Path(sys.argv[2]), name)
    dist.barrier()
    os._exit(0)  # skip teardown: other ranks may be gone
