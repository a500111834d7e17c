"""Where weights, gradients, masters and moments rest (the stage), and how much of them moves at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from shoal.config.problem import shown
from shoal.config.published import Published, inert, later, later_block, old
from shoal.config.section import Conflict, Count, Positive, Rewritten, Section, Switch, whole
from shoal.tier.settings import OffloadOptimizer, OffloadParam

__all__ = ["ZeroSettings"]

_SAME = "every setting of it gives the same training, and what moves is the same bytes"

_OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param",
                "cpu_offload_params": "offload_param"}


class ZeroSettings(Section):
    """ZeRO: which training state is sharded over the data ranks. `true` alone is the oldest form of stage 1."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole)] = 0
    """What is sharded: 0 nothing; 1 masters and moments; 2 gradients too; 3 weights too."""

    overlap_comm: Switch = True
    """Reduce gradients while backward runs. Bit-identical either way, so it is on at every stage."""

    reduce_bucket_size: Positive = 500_000_000
    """The most elements that one message of a reduction carries, over all ranks; larger units are cut into pieces of it,
    as they are at 4 MiB in any case. NCCL cuts by itself."""

    allgather_bucket_size: Positive = 500_000_000
    """The most elements that one message of an all-gather carries, in the same way."""

    ignore_unused_parameters: Switch = True
    """Let a parameter go without gradient in a step (it counts as zero); false raises an error that names it."""

    sub_group_size: Positive = 1_000_000_000
    """The most elements that one call of the optimizer takes at once, in whole 64s; a unit in memory is not cut for it."""

    stage3_max_live_parameters: Count = 1_000_000_000
    """Stage 3: the most elements that run-ahead keeps gathered at once; the unit in use is gathered in any case."""

    stage3_max_reuse_distance: Count = 0
    """Stage 3: keep a unit gathered when it is used again within so many elements. DeepSpeed's default is 1e9; here
    nothing is kept gathered unless asked, so that memory follows the formula. Ranks then run a forward all with gradients,
    or all without."""

    stage3_prefetch_bucket_size: Count = 5_000_000
    """Stage 3: how many elements are gathered ahead of their use, at least one unit; 0 gathers nothing ahead. DeepSpeed's
    default is 5e7, which is the whole of a small model; here memory follows the formula."""

    stage3_param_persistence_threshold: Count = 0
    """Stage 3: parameters of at most so many elements always stay gathered. DeepSpeed's default is 1e5; here units are
    gathered whole, so that small tensors cost no collective of their own and have no reason to stay."""

    stage3_model_persistence_threshold: Count = sys.maxsize
    """Stage 3: the most elements that may stay gathered for `stage3_param_persistence_threshold`."""

    stage3_gather_16bit_weights_on_model_save: Switch = False
    """Stage 3: let `save_16bit_model` gather the whole weights."""

    mics_shard_size: Annotated[int, Field(ge=-1), BeforeValidator(whole)] = -1
    """Ranks that share one copy of the sharded state; the data ranks hold as many copies as that leaves (MiCS, hybrid
    sharding). -1: one copy over all data ranks. The same as `mesh.shard`."""

    offload_param: OffloadParam = OffloadParam()
    """Where weights rest between their uses."""

    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    """Where masters, moments and reduced gradients rest."""

    aliases: ClassVar[Mapping[str, str]] = {
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
    }

    published: ClassVar[Mapping[str, Published]] = {
        "contiguous_gradients": inert(
            "copy gradients into one buffer", True, reason="gradients of a unit always rest in one buffer"
        ),
        "reduce_scatter": inert(
            "reduce-scatter in place of all-reduce", True, reason="the stage decides which collective runs"
        ),
        "use_multi_rank_bucket_allreduce": inert("let one reduction span several owners", True, reason=_SAME),
        "allgather_partitions": inert(
            "all-gather after the step in place of broadcasts", True, reason="an all-gather moves the fewest bytes"
        ),
        "round_robin_gradients": inert(
            "interleave gradient copies to the CPU", False, reason="each unit's gradient is copied once, as a whole"
        ),
        "elastic_checkpoint": inert(
            "load on another number of ranks", False, True, reason="every checkpoint loads on any number of ranks"
        ),
        "memory_efficient_linear": inert(
            "patch the linear function", True, reason="no function is patched, and gathered weights are not kept"
        ),
        "override_module_apply": inert(
            "patch Module.apply", True, reason="sharded parameters are gathered wherever `zero.Init` needs them"
        ),
        "load_from_fp32_weights": later("rebuild masters from 16-bit weights on load", True),
        "legacy_stage1": old("the first form of stage 1", False, reason='it is gone; write "stage": 1'),
        "grad_hooks": old(
            "listed in DeepSpeed's documents, refused by its code", reason="it never had a meaning; remove it"
        ),
        "pipeline_loading_checkpoint": later("overlap the loading of a checkpoint", False),
        "stage3_module_granularity_threshold": later("gather finely grained modules whole", 0),
        "stage3_use_all_reduce_for_fetch_params": later("gather by all-reduce", False),
        "stage3_allgather_sequential": later("gather one parameter at a time", False),
        "log_trace_cache_warnings": later("warn when the order of modules changes", False),
        "enable_sanity_checks": later("check more while training", False),
        "zero_hpz_partition_size": later("a second shard of the weights within a node (ZeRO++)", 1),
        "zero_quantized_weights": later("quantised weight gathers (ZeRO++)", False),
        "zero_quantized_nontrainable_weights": later("quantised gathers of frozen weights (ZeRO++)", False),
        "zero_quantized_gradients": later("quantised gradient reduction (ZeRO++)", False),
        "zeropp_loco_param": later_block("quantised gradients with error feedback (ZeRO++)"),
        "mics_hierarchical_params_gather": later("gather within nodes first (MiCS)", False),
        "save_muon_momentum_buffer_in_memory": later("keep Muon's momentum gathered", False),
        "leaf_module": later_block("modules gathered whole", {"classes": [], "names": [], "name_suffixes": []}),
        "compute_grad_norm": later("do without the gradient norm", True),
        "parameter_alignment": later("pad parameters to 16 bytes", False),
        "zenflow": later_block("updates that hide behind the next steps"),
    }

    @classmethod
    def rewrite(cls, given: dict[str, object]) -> Rewritten:
        values, origins, conflicts = dict(given), dict[str, str](), list[Conflict]()
        pinned = values.pop("cpu_offload_use_pin_memory", None)
        for former, new in _OLD_OFFLOAD.items():
            asked = values.pop(former, None)
            if asked in (None, False, "auto"):
                continue
            if asked is not True:
                conflicts.append(Conflict(keys=(former,), message=f"got {shown(asked)}; give true or false"))
            elif new in values:
                message = f"an old form of {new}, which stands beside it; remove it"
                conflicts.append(Conflict(keys=(former, new), message=message))
            else:
                values[new] = {"device": "cpu", **({} if pinned is None else {"pin_memory": pinned})}
                origins[f"{new}.device"] = f"given as '{former}'"
        return Rewritten(values=values, origins=origins, conflicts=tuple(conflicts))
