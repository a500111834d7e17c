"""The names by which systems are chosen, in the order in which they stand in tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from systems import ADAMW, BETAS, System, ddp, ddp_half, deepspeed, fsdp2, lookups, pipeline, plain, shoal, zero_redundancy

BASELINE = "ddp"

LOOKUPS = {
    f"{way}-{stage}-{optimizer}": System(title=f"{way}, stage {stage}, {optimizer}", settings=f"sparse_gradients {rows}",
                                         build=lookups(stage, optimizer, rows=rows), ratio=1.5 if stage == 3 else 1.0)
    for stage in (0, 1, 2, 3) for optimizer in ("Adam", "Adagrad") for way, rows in (("dense", False), ("rows", True))
}
"""The systems of sparse.py."""



@dataclass(frozen=True, slots=True, kw_only=True)
class Compressing:
    """An optimizer that compresses: its options but for AdamW's, and the system that its warm-up is, by stage."""

    type: str
    warm: Callable[[int], dict[str, int]]
    """The options that make a warm-up of so many steps."""
    warm_up: str
    stages: tuple[int, ...]
    ratio: float = 1.0
    period: int = 1

    def at(self, stage: int, warm: int, *, title: str = "") -> System:
        """Return the system that it is at `stage` with a warm-up of `warm` steps, after which its `title` may say more."""
        options = self.warm(warm)
        optimizer = {"type": self.type, "params": {**ADAMW, "betas": list(BETAS), **options}}
        return System(title=f"Shoal {self.type}, stage {stage}{title}", stage=stage, ratio=self.ratio, period=self.period,
                      settings=", ".join(f"{key} {value}" for key, value in options.items()),
                      build=shoal(stage, optimizer=optimizer), warm_up=self.warm_up.format(stage=stage))


FREEZE = 2
"""Steps of warm-up: fewer than the ranks run before the first turn, so that every turn is compressed."""

COMPRESSING = {
    "onebit-adam": Compressing(type="OneBitAdam", warm=lambda steps: {"freeze_step": steps}, warm_up="shoal-{stage}",
                               stages=(0, 1)),
    "zeroone-adam": Compressing(type="ZeroOneAdam", warm_up="shoal-{stage}", stages=(1,),
                                warm=lambda steps: {"var_update_scaler": steps, "var_freeze_step": steps}),
    "onebit-lamb": Compressing(type="OneBitLamb", warm=lambda steps: {"freeze_step": steps}, warm_up="shoal-lamb-{stage}",
                               stages=(1,)),
}
"""The systems of communication.py: another optimizer that compresses is another row."""

COMPRESSED = {f"{name}-{stage}": row.at(stage, FREEZE) for name, row in COMPRESSING.items() for stage in row.stages}

THROUGH, WARM_UP = 20, 0.15
"""Steps of a training from end to end, and the share of them that is warm-up."""

FROM_THE_START = {f"{name}-{stage}-through": row.at(stage, round(WARM_UP * THROUGH), title=", from its first step")
                  for name, row in COMPRESSING.items() for stage in row.stages}
"""The compressing systems of through.py."""

SYSTEMS = {
    "plain": System(title="one process alone", settings="fused AdamW, no communication", build=plain, ratio=0.0),
    "ddp": System(title="DDP", settings="fused AdamW, gradient_as_bucket_view, static_graph", build=ddp),
    "ddp-fp16": System(title="DDP, gradients sent in fp16", settings="as above, fp16_compress_hook", build=ddp_half,
                       ratio=0.5),
    "zero-redundancy": System(title="ZeroRedundancyOptimizer", settings="DDP as above, parameters_as_bucket_view, fused",
                              build=zero_redundancy, ratio=1.0),
    "fsdp2": System(title="FSDP2", settings="fully_shard on each block and the root, fused AdamW", build=fsdp2, ratio=1.5),
    **{f"deepspeed-{stage}": System(title=f"DeepSpeed stage {stage}", settings="torch_adam, fused", peer=True,
                                    build=deepspeed(stage), ratio=1.5 if stage == 3 else 1.0) for stage in (0, 1, 2, 3)},
    "deepspeed-3-released": System(
        title="DeepSpeed stage 3, released", settings="as above, nothing kept gathered", peer=True, ratio=1.5,
        build=deepspeed(3, stage3_max_live_parameters=0, stage3_max_reuse_distance=0)),
    **{f"shoal-{stage}": System(title=f"Shoal stage {stage}", settings="defaults", build=shoal(stage),
                                ratio=1.5 if stage == 3 else 1.0) for stage in (0, 1, 2, 3)},
    **{f"shoal-{stage}-sockets": System(title=f"Shoal stage {stage}, sockets", settings="direct_bytes null",
                                        build=shoal(stage, direct_bytes=None), ratio=1.5 if stage == 3 else 1.0)
       for stage in (1, 2, 3)},
    **{f"shoal-pipeline-{schedule}": System(title=f"Shoal pipeline, {title}", settings="a stage a rank", whole=True,
                                            build=pipeline(schedule))
       for schedule, title in (("1f1b", "1F1B"), ("zb-h1", "ZB-H1"), ("zb-h2", "ZB-H2"))},
    "shoal-pipeline-zb-h2-all": System(title="Shoal pipeline, ZB-H2, all in flight", settings="in_flight: all",
                                       whole=True, build=pipeline("zb-h2", all_in_flight=True)),
    "shoal-lamb-1": System(title="Shoal Lamb, stage 1", settings="defaults", build=shoal(
        1, optimizer={"type": "Lamb", "params": {**ADAMW, "betas": list(BETAS)}})),
    **LOOKUPS,
    **COMPRESSED,
    **FROM_THE_START,
}
