"""The names by which systems are chosen, in the order in which they stand in tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from ddp_hooks import LATE, ONE_BUCKET, PERIOD, START, averaged, bf16, fp16, local, power_sgd
from machine import ROOT
from systems import (
    ADAMW,
    BETAS,
    System,
    ddp,
    ddp_lookups,
    deepspeed,
    fsdp2,
    lookups,
    pipeline,
    plain,
    plain_shard,
    shoal,
    torch_pipeline,
    zero_redundancy,
)
from torch import nn

BASELINE = "ddp"

LOOKUPS = {
    f"{way}-{stage}-{optimizer}": System(title=f"{way}, stage {stage}, {optimizer}", settings=f"sparse_gradients {rows}",
                                         build=lookups(stage, optimizer, rows=rows), ratio=1.5 if stage == 3 else 1.0)
    for stage in (0, 1, 2, 3) for optimizer in ("Adam", "Adagrad") for way, rows in (("dense", False), ("rows", True))
}
"""The systems of sparse.py, beside `DDP_LOOKUPS`."""

DDP_LOOKUPS = {f"ddp-rows-{optimizer}": System(title=f"DDP, sparse gradients, {optimizer}", settings="sparse=True",
                                               build=ddp_lookups(optimizer)) for optimizer in ("Adam", "Adagrad")}

DDP_SETTINGS = {
    "ddp-bucket-5": System(title="DDP, buckets of 5 MB", settings="static_graph", build=ddp(5), family="ddp"),
    "ddp-bucket-120": System(title="DDP, buckets of 120 MB", settings="static_graph", build=ddp(120), family="ddp"),
    "ddp-dynamic": System(title="DDP, no static graph", settings="buckets of 25 MB", build=ddp(static=False), family="ddp"),
    "ddp-dynamic-5": System(title="DDP, no static graph, buckets of 5 MB", settings="", build=ddp(5, static=False),
                            family="ddp"),
}

FSDP2_SETTINGS = {
    "fsdp2-prefetch": System(title="FSDP2, one block gathered ahead", settings="set_modules_to_forward_prefetch, "
    "backward too",
                             build=fsdp2(prefetch=1), ratio=1.5, family="fsdp2"),
    "fsdp2-2": System(title="FSDP2, groups of 2 blocks", settings="fully_shard([a, b])", build=fsdp2(blocks=2), ratio=1.5,
                      family="fsdp2"),
    "fsdp2-2-prefetch": System(title="FSDP2, groups of 2 blocks, one ahead", settings="", build=fsdp2(blocks=2, prefetch=1),
                               ratio=1.5, family="fsdp2"),
    "fsdp2-3": System(title="FSDP2, groups of 3 blocks", settings="fully_shard([a, b, c])", build=fsdp2(blocks=3), ratio=1.5,
                      family="fsdp2"),
    "fsdp2-3-prefetch": System(title="FSDP2, groups of 3 blocks, one ahead", settings="", build=fsdp2(blocks=3, prefetch=1),
                               ratio=1.5, family="fsdp2"),
    "fsdp2-kept": System(title="FSDP2, weights kept after forward", settings="reshard_after_forward False",
                         build=fsdp2(reshard=False), family="fsdp2-kept"),
    "fsdp2-kept-prefetch": System(title="FSDP2, kept, one block gathered ahead", settings="reshard_after_forward False",
                                  build=fsdp2(reshard=False, prefetch=1), family="fsdp2-kept"),
    "fsdp2-kept-3": System(title="FSDP2, kept, groups of 3 blocks", settings="reshard_after_forward False",
                           build=fsdp2(reshard=False, blocks=3), family="fsdp2-kept"),
    "fsdp2-root": System(title="FSDP2, the model as one group", settings="fully_shard on the root alone",
                         build=fsdp2(blocks=0, reshard=False), family="fsdp2-kept"),
}

MEGA = 1_000_000
BUCKETS = "reduce_bucket_size, allgather_bucket_size"
DEEPSPEED_SETTINGS = {
    **{f"deepspeed-{stage}-overlap": System(
        title=f"DeepSpeed stage {stage}, overlap_comm", settings="buckets by default", peer=True,
        family=f"deepspeed-{stage}",
        build=deepspeed(stage, overlap_comm=True), ratio=1.5 if stage == 3 else 1.0) for stage in (1, 2, 3)},
    **{f"deepspeed-{stage}-overlap-{bucket}m": System(
        title=f"DeepSpeed stage {stage}, overlap_comm, buckets of {bucket} M", settings=BUCKETS,
        peer=True, family=f"deepspeed-{stage}", ratio=1.5 if stage == 3 else 1.0,
        build=deepspeed(stage, overlap_comm=True, reduce_bucket_size=bucket * MEGA, allgather_bucket_size=bucket * MEGA))
       for stage in (1, 2) for bucket in (2, 5, 20)},
    **{f"deepspeed-{stage}-{bucket}m": System(
        title=f"DeepSpeed stage {stage}, buckets of {bucket} M", settings=BUCKETS, peer=True,
        family=f"deepspeed-{stage}", ratio=1.5 if stage == 3 else 1.0,
        build=deepspeed(stage, reduce_bucket_size=bucket * MEGA, allgather_bucket_size=bucket * MEGA))
       for stage in (1, 2) for bucket in (5, 20)},
    "deepspeed-3-leaf": System(
        title="DeepSpeed stage 3, blocks as leaf modules", settings="set_z3_leaf_modules", peer=True, ratio=1.5,
        family="deepspeed-3", build=deepspeed(3, leaves=True)),
    "deepspeed-3-5m": System(
        title="DeepSpeed stage 3, buckets of 5 M", settings="reduce_bucket_size, stage3_prefetch_bucket_size", peer=True,
        ratio=1.5, family="deepspeed-3",
        build=deepspeed(3, reduce_bucket_size=5 * MEGA, stage3_prefetch_bucket_size=5 * MEGA)),
    "deepspeed-3-leaf-5m": System(
        title="DeepSpeed stage 3, leaf modules, buckets of 5 M", settings="both", peer=True, ratio=1.5, family="deepspeed-3",
        build=deepspeed(3, leaves=True, reduce_bucket_size=5 * MEGA, stage3_prefetch_bucket_size=5 * MEGA)),
}

DDP_COMPRESSING = {
    "ddp-fp16": System(title="DDP, gradients sent in fp16", settings="fp16_compress_hook", build=ddp(hook=fp16()),
                       ratio=0.5),
    "ddp-bf16": System(title="DDP, gradients sent in bf16", settings="a hook as bf16_compress_hook", build=ddp(hook=bf16()),
                       ratio=0.5),
    **{f"ddp-powersgd-{rank}": System(title=f"DDP, PowerSGD of rank {rank}", settings="powerSGD_hook, one bucket", rank=rank,
                                      warm_up="ddp", build=ddp(ONE_BUCKET, hook=power_sgd(rank))) for rank in (1, 4)},
    **{f"ddp-powersgd-{rank}-ordered": System(
        title=f"DDP, PowerSGD of rank {rank}, bucket after bucket", settings="powerSGD_hook in a thread, buckets of 25 MB",
        rank=rank, warm_up="ddp", build=ddp(hook=power_sgd(rank, ordered=True))) for rank in (1, 4)},
    "ddp-local": System(
        title=f"DDP, weights averaged every {PERIOD} steps", settings="post_localSGD_hook, PostLocalSGDOptimizer",
        ratio=1 / PERIOD, period=PERIOD, warm_up="ddp", build=ddp(hook=local(START), optimizer=averaged(START))),
}
"""What plain torch offers for a slow link beside DDP; beside these there are its pipelines."""


TORCH_PIPELINES = {
    f"torch-pipeline-{name}": System(title=f"torch pipeline, {title}", settings="a stage a rank", whole=True,
                                     build=torch_pipeline(schedule)) for name, title, schedule in (
        ("1f1b", "1F1B", "Schedule1F1B"), ("zero-bubble", "zero bubble", "ScheduleInterleavedZeroBubble"))}

EXAMPLES = ROOT / "examples" / "gpt"
TRAINING_STEPS = 300
"""Steps of a training, in which quality is compared (convergence.py) and to which speed from end to end applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressing:
    """An optimizer that compresses: the configuration of examples/gpt with its options, and what it is while it warms up."""

    type: str
    config: str
    warm_up: str
    stages: tuple[int, ...]
    compressed: dict[str, int]
    """The options with which every step after the first few is compressed."""
    ratio: float = 1.0
    period: int = 1

    def at(self, stage: int, options: dict[str, int], *, title: str = "") -> System:
        """Return the system that it is at `stage` with `options` of its schedule; its `title` may say more."""
        optimizer = {"type": self.type, "params": {**ADAMW, "betas": list(BETAS), **options}}
        return System(title=f"Shoal {self.type}, stage {stage}{title}", stage=stage, ratio=self.ratio, period=self.period,
                      settings=", ".join(f"{key} {value}" for key, value in options.items()),
                      build=shoal(stage, optimizer=optimizer), warm_up=self.warm_up.format(stage=stage))

    def schedule(self, steps: int) -> dict[str, int]:
        """Return the options of its schedule of compression in a training of so many steps, as examples/gpt stretches
        them.

        The peers' environment imports this file, too, and has no Shoal that reads the comments of the file.
        """
        lines = (EXAMPLES / f"{self.config}.json").read_text().splitlines()
        config: dict[str, Any] = json.loads("".join(line for line in lines if not line.lstrip().startswith("//")))
        total, params = config["scheduler"]["params"]["total_num_steps"], config["optimizer"]["params"]
        stretched = {key: max(1, params[key] * steps // total) for key in STRETCHED if key in params}
        return stretched | {key: params[key] for key in ("local_step_clipper",) if key in params}


STRETCHED = ("freeze_step", "var_freeze_step", "var_update_scaler", "local_step_scaler")

FREEZE = 2
"""Steps of warm-up: fewer than the ranks run before the first turn, so that every turn is compressed."""

COMPRESSING = {
    "onebit-adam": Compressing(type="OneBitAdam", config="onebit", warm_up="shoal-{stage}", stages=(0, 1),
                               compressed={"freeze_step": FREEZE}),
    "zeroone-adam": Compressing(type="ZeroOneAdam", config="zeroone", warm_up="shoal-{stage}", stages=(1,),
                                compressed={"var_update_scaler": FREEZE, "var_freeze_step": FREEZE}),
    "onebit-lamb": Compressing(type="OneBitLamb", config="onebit-lamb", warm_up="shoal-lamb-{stage}", stages=(1,),
                               compressed={"freeze_step": FREEZE}),
}
"""The systems of communication.py: another optimizer that compresses is another row."""

COMPRESSED = {f"{name}-{stage}": row.at(stage, row.compressed, title=", a compressed step")
              for name, row in COMPRESSING.items() for stage in row.stages}
BY_SYSTEM = {f"{name}-{stage}": row for name, row in COMPRESSING.items() for stage in row.stages}

THROUGH = 20
"""Steps of a training from end to end that is run; those whose warm-up is a share of the steps can be so short."""

FROM_THE_START = {f"{name}-{stage}-through": row.at(stage, row.schedule(THROUGH), title=", from its first step")
                  for name, row in COMPRESSING.items() for stage in row.stages if "freeze_step" in row.compressed}
"""The compressing systems of whole_training.py."""


@cache
def exact_share(name: str, steps: int = TRAINING_STEPS) -> float:
    """Return the share of what a training of `steps` sends uncompressed, gradients and weights counting alike.

    The optimizer itself says what each step sends; PowerSGD and averaged weights begin after some steps of whole gradients;
    others never compress.
    """
    from shoal.optim.onebit import OneBitAdam, ZeroOneAdam
    from shoal.optim.onebit_lamb import OneBitLamb

    if SYSTEMS[name].rank:
        return START / steps
    if name not in BY_SYSTEM:
        return LATE if SYSTEMS[name].warm_up else 0.0
    row = BY_SYSTEM[name]
    kinds: dict[str, Any] = {kind.__name__: kind for kind in (OneBitAdam, ZeroOneAdam, OneBitLamb)}
    optimizer = kinds[row.type]([nn.Parameter(torch.zeros(1))], lr=ADAMW["lr"], **row.schedule(steps))
    exact = 0.0
    for _ in range(steps):
        sent = optimizer.wire_format()
        exact += 0.5 * (not sent.gradient) + 0.5 * (not sent.weights)
        optimizer.count_step()
    return exact / steps


ALONE = {
    "plain": System(title="one process alone", settings="fused AdamW, no communication", build=plain, ratio=0.0),
    "plain-shard": System(title="one process alone, AdamW of 1/N", settings="the first 1/N of each parameter is stepped",
                          build=plain_shard, ratio=0.0),
}
"""Nothing is sent, so that each rank trains a model of its own. The first bounds every stage 0, the second stages 1 to 3."""

SYSTEMS = {
    **ALONE,
    "ddp": System(title="DDP", settings="fused AdamW, gradient_as_bucket_view, static_graph", build=ddp(), family="ddp"),
    **DDP_SETTINGS,
    **DDP_COMPRESSING,
    "zero-redundancy": System(title="ZeroRedundancyOptimizer", settings="DDP as above, parameters_as_bucket_view, fused",
                              build=zero_redundancy, ratio=1.0),
    "fsdp2": System(title="FSDP2", settings="fully_shard on each block and the root, fused AdamW", build=fsdp2(),
                    ratio=1.5, family="fsdp2"),
    **FSDP2_SETTINGS,
    **{f"deepspeed-{stage}": System(title=f"DeepSpeed stage {stage}", settings="torch_adam, fused", peer=True,
                                    build=deepspeed(stage), ratio=1.5 if stage == 3 else 1.0,
                                    family=f"deepspeed-{stage}") for stage in (0, 1, 2, 3)},
    **DEEPSPEED_SETTINGS,
    "deepspeed-3-released": System(
        title="DeepSpeed stage 3, released", settings="as above, nothing kept gathered", peer=True, ratio=1.5,
        build=deepspeed(3, stage3_max_live_parameters=0, stage3_max_reuse_distance=0)),
    **{f"shoal-{stage}": System(title=f"Shoal stage {stage}", settings="defaults", build=shoal(stage),
                                ratio=1.5 if stage == 3 else 1.0) for stage in (0, 1, 2, 3)},
    **{f"shoal-{stage}-sockets": System(title=f"Shoal stage {stage}, sockets", settings="direct_bytes null",
                                        build=shoal(stage, direct_bytes=None), ratio=1.5 if stage == 3 else 1.0)
       for stage in (0, 1, 2, 3)},
    **{f"shoal-pipeline-{schedule}": System(title=f"Shoal pipeline, {title}", settings="a stage a rank", whole=True,
                                            build=pipeline(schedule))
       for schedule, title in (("1f1b", "1F1B"), ("zb-h1", "ZB-H1"), ("zb-h2", "ZB-H2"))},
    **TORCH_PIPELINES,
    "shoal-pipeline-zb-h2-all": System(title="Shoal pipeline, ZB-H2, all in flight", settings="in_flight: all",
                                       whole=True, build=pipeline("zb-h2", all_in_flight=True)),
    "shoal-lamb-1": System(title="Shoal Lamb, stage 1", settings="defaults", build=shoal(
        1, optimizer={"type": "Lamb", "params": {**ADAMW, "betas": list(BETAS)}})),
    **LOOKUPS,
    **DDP_LOOKUPS,
    **COMPRESSED,
    **FROM_THE_START,
}
