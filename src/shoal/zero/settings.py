"""The settings of ZeRO: the stage, bucket sizes, prefetch and offload."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from shoal.config.problem import shown
from shoal.config.published import Published, inert, later, later_block, old
from shoal.config.section import Conflict, Count, Positive, Rewritten, Section, Switch, integral
from shoal.tier.settings import OffloadOptimizer, OffloadParam

__all__ = ["ZeroSettings"]

_SAME = "every setting of it gives the same training, and what moves is the same bytes"

_OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param",
                "cpu_offload_params": "offload_param"}


class ZeroSettings(Section):
    """ZeRO shards training state over the data ranks. The value `true` is the oldest form of stage 1."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(integral)] = 0
    """The sharded state: 0 none; 1 masters and moments; 2 gradients too; 3 weights too."""

    overlap_comm: Switch = True
    """Reduce gradients while backward runs. Results are bit-identical either way, so it is on at every stage."""

    reduce_bucket_size: Positive = 500_000_000
    """Maximum elements of one reduction message, over all ranks; larger units are split. Messages are also split at 4 MiB;
    NCCL splits messages itself. Rows of sparse gradients and compressed gradients are not split."""

    allgather_bucket_size: Positive = 500_000_000
    """Maximum elements of one all-gather message, likewise."""

    ignore_unused_parameters: Switch = True
    """Skip a parameter that received no gradient on any rank, as plain PyTorch does; false raises an error that names it."""

    sub_group_size: Positive = 1_000_000_000
    """Maximum elements of one optimizer call, in multiples of 64; a unit in memory is not split."""

    stage3_max_live_parameters: Count = 1_000_000_000
    """Stage 3: maximum elements that prefetch keeps gathered; the unit in use is always gathered."""

    stage3_max_reuse_distance: Count = 0
    """Stage 3: keep a unit gathered if its next use is within this many elements. DeepSpeed's default is 1e9; the default
    here keeps no unit gathered, so that memory follows the formula. If it is not 0, all ranks must run a given forward
    with gradients, or all without."""

    stage3_prefetch_bucket_size: Count = 5_000_000
    """Stage 3: elements to gather ahead of their use, at least one unit; 0 disables prefetch. DeepSpeed's default is 5e7,
    which is all of a small model; here memory follows the formula."""

    stage3_param_persistence_threshold: Count = 0
    """Stage 3: parameters of at most this many elements always stay gathered. DeepSpeed's default is 1e5. Here a unit is
    gathered in one collective, so small tensors need no collective of their own."""

    stage3_model_persistence_threshold: Count = sys.maxsize
    """Stage 3: maximum elements that stay gathered because of `stage3_param_persistence_threshold`."""

    stage3_gather_16bit_weights_on_model_save: Switch = False
    """Stage 3: allow `save_16bit_model` to gather the full weights."""

    mics_shard_size: Annotated[int, Field(ge=-1), BeforeValidator(integral)] = -1
    """Ranks that share one copy of the sharded state (MiCS, hybrid sharding); the data ranks divided by this number is
    the number of copies. -1: one copy over all data ranks. The same as `mesh.shard`."""

    compute_grad_norm: Switch = True
    """Compute the global gradient norm at every step, for `get_global_grad_norm`: one read of the gradients that rest on a
    rank. Clipping and overflow checks compute it in any case."""

    offload_param: OffloadParam = OffloadParam()
    """Offload of the weights between their uses."""

    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    """Offload of masters, moments and reduced gradients."""

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
