"""Checkpoints: what is written, read back at each stage, tags, client state, parts of the state, zero_to_fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from torch import nn

from .case import case, raised
from .on_zero import ADAM, batch, network, start, train, whole

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 5}}
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 3}},
    "bf16": {"bf16": {"enabled": True}},
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def other(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


@case(ranks=2, stage=[0, 1, 2, 3], mode=list(MODES))
def resumed(stage: int, mode: str) -> Any:
    engine = start(stage, scheduler=SCHEDULE, **MODES[mode])
    train(engine, 2, DTYPES[mode])
    saved = engine.save_checkpoint("ckpt", tag="here", client_state={"epoch": 3})
    expected = train(engine, 2, DTYPES[mode])
    again = start(stage, other(network()), scheduler=SCHEDULE, **MODES[mode])
    path, client = again.load_checkpoint("ckpt", tag="here")
    counters = [
        again.global_steps,
        again.skipped_steps,
        again.global_samples,
        again.lr_scheduler.state_dict(),
        again.get_lr(),
    ]
    return [
        saved is True or saved is None,
        path is not None,
        client["epoch"],
        counters,
        train(again, 2, DTYPES[mode]) == expected,
    ]


@case(ranks=2, stage=[0, 1, 2, 3], what=["optimizer", "scheduler", "module_only", "all"])
def parts(stage: int, what: str) -> Any:
    engine = start(stage, scheduler=SCHEDULE)
    train(engine, 3)
    engine.save_checkpoint("ckpt")
    again = start(stage, other(network()), scheduler=SCHEDULE)
    keywords: dict[str, Any] = {
        "optimizer": {"load_optimizer_states": False},
        "scheduler": {"load_lr_scheduler_states": False},
        "module_only": {"load_module_only": True},
        "all": {},
    }[what]
    path, _ = again.load_checkpoint("ckpt", **keywords)
    return [
        path is not None,
        again.global_steps,
        again.lr_scheduler.state_dict(),
        {name: value.sum() for name, value in whole(again).items()},
        train(again, 1) if what != "module_only" else None,
    ]


@case(ranks=2, stage=[0, 1, 2, 3], mode=["fp32", "bf16", "fp16"])
def files(stage: int, mode: str) -> Any:
    engine = start(stage, **MODES[mode])
    train(engine, 1, DTYPES[mode])
    engine.save_checkpoint("ckpt", tag="t")
    torch.distributed.barrier()
    names = sorted(path.name for path in Path("ckpt/t").iterdir() if path.suffix == ".pt")
    return [names, Path("ckpt/latest").read_text(), Path("ckpt/zero_to_fp32.py").exists()]


@case(ranks=2, stage=[0, 2, 3])
def keys_of_files(stage: int) -> Any:
    engine = start(stage, scheduler=SCHEDULE)
    train(engine, 1)
    engine.save_checkpoint("ckpt", tag="t", client_state={"mine": 1})
    torch.distributed.barrier()
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    found = torch.load(f"ckpt/t/{name}", weights_only=False)
    answer: list[Any] = [
        sorted(set(found) - {"sparse_tensor_module_names"}),
        found["global_steps"],
        found["dp_world_size"],
        found["mp_world_size"],
        found["mine"],
        sorted(found["module"]),
    ]
    if stage:
        state = torch.load("ckpt/t/zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
        answer.append([sorted(state), int(state["optimizer_state_dict"]["zero_stage"])])
        answer.append([dict((key, list(value)) for key, value in group.items()) for group in found["param_shapes"]])
    return answer


@case(ranks=2, tag=[None, "mine", 17, ""])
def tags(tag: Any) -> Any:
    engine = start(1)
    train(engine, 2)
    engine.save_checkpoint("ckpt", tag=tag, save_latest=True)
    torch.distributed.barrier()
    return [Path("ckpt/latest").read_text(), sorted(path.name for path in Path("ckpt").iterdir() if path.is_dir())]


@case(ranks=2, stage=[0, 1, 2, 3])
def missing(stage: int) -> Any:
    engine = start(stage)
    nothing = engine.load_checkpoint("nowhere")
    engine.save_checkpoint("ckpt", tag="a", save_latest=False)
    torch.distributed.barrier()
    return [list(nothing), Path("ckpt/latest").exists(), raised(lambda: engine.load_checkpoint("ckpt", tag="b"))]


@case(ranks=2, wrong=["empty", "reserved"])
def save_refuses(wrong: str) -> Any:
    engine = start(1)
    if wrong == "empty":
        return raised(lambda: engine.save_checkpoint("", tag="a"))
    return raised(lambda: engine.save_checkpoint("ckpt", client_state={"checkpoint_parallel_dimensions": 1}))


@case(ranks=2, stage=[1, 2, 3], strict=[True, False])
def another_model(stage: int, strict: bool) -> Any:
    engine = start(stage)
    engine.save_checkpoint("ckpt")
    torch.manual_seed(0)
    wider = nn.Sequential(*network(), nn.Linear(1, 1))
    again = start(stage, wider)
    return (
        raised(lambda: again.load_checkpoint("ckpt", load_module_strict=strict, load_module_only=True)) if strict else None
    )


@case(ranks=2, stage=[1, 2, 3], way=["get", "convert", "load", "tag", "safetensors", "shards"])
def to_fp32(stage: int, way: str) -> Any:
    engine = start(stage)
    train(engine, 2)
    engine.save_checkpoint("ckpt", tag="x")
    expected = whole(engine)
    torch.distributed.barrier()
    if torch.distributed.get_rank():
        return None
    if way in ("get", "tag"):
        found = get_fp32_state_dict_from_zero_checkpoint("ckpt", tag="x" if way == "tag" else None)
        return [
            list(found),
            all(torch.equal(found[name], expected[name]) for name in expected),
            {str(value.dtype) for value in found.values()},
        ]
    if way == "load":
        model = load_state_dict_from_zero_checkpoint(other(network()), "ckpt")
        return all(torch.equal(value, expected[name]) for name, value in model.named_parameters())
    keywords: dict[str, Any] = {
        "convert": {},
        "safetensors": {"safe_serialization": True},
        "shards": {"max_shard_size": "200B"},
    }[way]
    convert_zero_checkpoint_to_fp32_state_dict("ckpt", "out", **keywords)
    return sorted(path.name for path in Path("out").iterdir())


@case(what=["folder", "latest", "file"])
def to_fp32_refuses(what: str) -> Any:
    engine = start(2)
    engine.save_checkpoint("ckpt", tag="x")
    if what == "folder":
        return raised(lambda: get_fp32_state_dict_from_zero_checkpoint("nowhere"))
    if what == "latest":
        Path("ckpt/latest").unlink()
        return raised(lambda: get_fp32_state_dict_from_zero_checkpoint("ckpt"))
    return raised(lambda: get_fp32_state_dict_from_zero_checkpoint("ckpt", tag="y"))


@case(ranks=2, stage=[0, 1, 2, 3], exclude=[False, True])
def frozen(stage: int, exclude: bool) -> Any:
    engine = start(stage, network(frozen=True))
    train(engine, 1)
    engine.save_checkpoint("ckpt", tag="x", exclude_frozen_parameters=exclude)
    expected = whole(engine)
    torch.distributed.barrier()
    again = start(stage, other(network(frozen=True)))
    again.load_checkpoint("ckpt", tag="x", load_module_strict=not exclude)
    found = whole(again)
    names = (
        sorted(get_fp32_state_dict_from_zero_checkpoint("ckpt", exclude_frozen_parameters=exclude))
        if stage and not torch.distributed.get_rank()
        else None
    )
    return [{name: torch.equal(found[name], expected[name]) for name in expected}, names]


@case(ranks=2, stage=[0, 1, 2, 3])
def buffers(stage: int) -> Any:
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))  # noqa: E731
    engine = start(stage, make())
    train(engine, 2)
    engine.save_checkpoint("ckpt")
    again = start(stage, make())
    again.load_checkpoint("ckpt")
    return [
        int(again.module[1].num_batches_tracked),
        torch.equal(again.module[1].running_mean, engine.module[1].running_mean),
    ]


@case(ranks=2, stage=[0, 1, 2, 3])
def own_loading(stage: int) -> Any:
    engine = start(stage)
    engine.save_checkpoint("ckpt")
    calls: list[Any] = []

    def load(src: Any, dst: Any) -> None:
        calls.append([sorted(src), type(dst).__name__])

    again = start(stage)
    failed = raised(lambda: again.load_checkpoint("ckpt", custom_load_fn=load))
    return [failed, len(calls) > 0]


@case(ranks=2, saved=[0, 1, 2], loaded=[0, 1, 2])
def weights_of_another_stage(saved: int, loaded: int) -> Any:
    engine = start(saved)
    train(engine, 1)
    engine.save_checkpoint("ckpt")
    expected = whole(engine)
    again = start(loaded, other(network()))
    path, _ = again.load_checkpoint("ckpt", load_module_only=True)
    found = whole(again)
    return [path is not None, all(torch.equal(found[name], expected[name]) for name in expected)]


@case(ranks=2, stage=[1, 2, 3])
def optimizer_of_the_client(stage: int) -> Any:
    def make() -> Any:
        model = network()
        return deepspeed.initialize(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
            config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}},
        )[0]

    deepspeed.init_distributed("gloo")
    engine = make()
    train(engine, 2)
    engine.save_checkpoint("ckpt")
    expected = train(engine, 1)
    again = make()
    again.load_checkpoint("ckpt")
    return train(again, 1) == expected


@case(ranks=2, stage=[0, 1, 2, 3])
def saved_twice(stage: int) -> Any:
    engine = start(stage)
    for _ in range(2):
        train(engine, 1)
        engine.save_checkpoint("ckpt")
    torch.distributed.barrier()
    return [Path("ckpt/latest").read_text(), sorted(path.name for path in Path("ckpt").iterdir() if path.is_dir())]


@case(mode=["Ignore", "Warn", "Fail"], ranks=2, same=[True, False])
def tag_validation(mode: str, same: bool) -> Any:
    engine = start(1, checkpoint={"tag_validation": mode})
    tag = "same" if same else f"rank{torch.distributed.get_rank()}"
    if same or mode == "Fail":
        return raised(lambda: engine.save_checkpoint("ckpt", tag=tag))
    return None


@case(ranks=2, stage=[1, 2])
def universal(stage: int) -> Any:
    from argparse import Namespace

    from deepspeed.checkpoint.ds_to_universal import main as convert

    engine = start(stage, optimizer=ADAM)
    train(engine, 2)
    engine.save_checkpoint("ckpt", tag="x")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        convert(
            Namespace(
                input_folder="ckpt/x",
                output_folder="ckpt/x_universal",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    torch.distributed.barrier()
    expected = train(engine, 1)
    again = start(stage, other(network()), optimizer=ADAM, checkpoint={"load_universal": True})
    again.load_checkpoint("ckpt", tag="x_universal")
    return [
        train(again, 1) == expected,
        sorted(path.name for path in Path("ckpt/x_universal/zero").iterdir()),
        batch().shape[0],
    ]
