"""A published configuration in the form that Shoal's own, strict configuration accepts.

Values that the published sections refuse are refused here with the published error. What is left over is handled by one
table: keys without effect are dropped with one warning that says why, unknown keys are dropped with the nearest match, and
every other key is passed on, so that Shoal honours it or says that it cannot.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from shoal.compat.deepspeed.comm.config import DeepSpeedCommsConfig
from shoal.compat.deepspeed.elasticity.elasticity import refuse_other_batch
from shoal.compat.deepspeed.monitor.config import DeepSpeedMonitorConfig, get_monitor_config
from shoal.compat.deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from shoal.compat.deepspeed.runtime.zero.config import DeepSpeedZeroConfig, get_zero_config, read_zero_config_deprecated
from shoal.config.problem import join, nearest, shown
from shoal.config.published import is_auto
from shoal.config.resolve import nested
from shoal.config.section import Section
from shoal.engine.schema import Config
from shoal.log import warn_once

__all__ = ["INERT", "Inert", "tolerate", "warn_unknown"]

PERSISTENT_BELOW = 100_000
"""The published default of `stage3_param_persistence_threshold`: scripts read such parameters without gathering them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inert:
    """A key that has no effect under Shoal."""

    default: object
    """The value that asks for nothing; another one warns."""
    reason: str
    for_scripts: bool = False
    """Dropped although Shoal has such a key: under the published name only scripts read it."""
    native: frozenset[str] = frozenset()
    """Keys of the block that Shoal alone has; the engine reads a block with one of them."""


_WHOLE_UNITS = "a block is gathered whole, in one all-gather, whatever its modules are"
_CHECKED = "such reads and writes are always checked"

INERT: Mapping[str, Inert] = {
    "wall_clock_breakdown": Inert(default=False, reason="phases are recorded by `with engine.trace() as trace`, on demand"),
    "memory_breakdown": Inert(default=False, reason="engine.model_state_bytes() measures memory, on demand"),
    "disable_python_gc": Inert(default=False, reason="no step leaves reference cycles for the collector"),
    "graph_harvesting": Inert(default=False, reason="nothing is captured as a CUDA graph; results are the same"),
    "seq_parallel_communication_data_type": Inert(default="fp32", reason="there is no sequence-parallel reduction"),
    "activation_checkpointing": Inert(
        default=None, reason="checkpointing.configure reads it, the engine does not", for_scripts=True,
        native=frozenset({"recompute", "rest", "budget", "nvme_path"})),
    "sparse_attention": Inert(default=None, reason="scripts read it, the engine does not", for_scripts=True),
    "timers": Inert(default=None, reason="throughput is logged by steps_per_print, and needs no synchronised timers"),
    "data_types.keep_in_fp32_modules": Inert(
        default="auto", reason="buffers keep their dtype, but for the statistics of a BatchNorm"),
    "checkpoint.parallel_write": Inert(default=None, reason="every rank writes its own part in any case"),
    "checkpoint.writer": Inert(default=None, reason="there is one writer, which overlaps with training"),
    "checkpoint.use_node_local_storage": Inert(default=False, reason="give a folder that every rank sees"),
    "zero_optimization.module_granularity_threshold": Inert(default=0, reason=_WHOLE_UNITS),
    "zero_optimization.leaf_module": Inert(default=None, reason="initialize marks these modules by itself"),
    "zero_optimization.use_all_reduce_for_fetch_params": Inert(default=False, reason="an all-gather moves fewer bytes"),
    "zero_optimization.allgather_sequential": Inert(default=False, reason=_WHOLE_UNITS),
    "zero_optimization.log_trace_cache_warnings": Inert(default=False, reason="a changed order of modules is followed"),
    "zero_optimization.enable_sanity_checks": Inert(default=False, reason=_CHECKED),
    "zero_optimization.pipeline_loading_checkpoint": Inert(default=False, reason="reading always overlaps with copying"),
    "zero_optimization.load_from_fp32_weights": Inert(default=True, reason="masters are loaded exactly as saved"),
    "zero_optimization.parameter_alignment": Inert(default=False, reason="slices start at multiples of 64 elements"),
    "zero_optimization.legacy_stage1": Inert(default=False, reason="there is one form of stage 1"),
    "zero_optimization.contiguous_gradients": Inert(default=True, reason="gradients of a unit always rest in one buffer"),
    "zero_optimization.reduce_scatter": Inert(default=True, reason="the stage decides which collective runs"),
}
"""Keys without effect, by path, in their spelling without `stage3_`. A default of None: every value passes silently."""


def tolerate(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published configuration `given` as Shoal's own; `given` is not changed.

    Raises the published error of a section that is wrong, and `AssertionError` for fp16 beside bf16.
    """
    given = _nest_dotted(given)
    _refuse_invalid(given)
    values = {key: value for key, value in copy.deepcopy(dict(given)).items() if value is not None}
    zero = values.get("zero_optimization")
    if isinstance(zero, bool):
        values["zero_optimization"] = read_zero_config_deprecated(values)
        values.pop("allgather_size", None)
    elif isinstance(zero, dict):
        zero["stage"] = int(get_zero_config(given).stage)
    for followed in ("managed_gradient_accumulation", "torch_autocast", "progressive_layer_drop",
                     *DeepSpeedMonitorConfig.model_fields):
        values.pop(followed, None)  # the published engine itself honours it
    values = _known(Config, values, "")
    _resolve_averaging(values)
    zero = values.setdefault("zero_optimization", {})
    if isinstance(zero, dict) and not {"stage3_param_persistence_threshold", "param_persistence_threshold"} & {
            key for key, value in zero.items() if not is_auto(value)}:
        zero["stage3_param_persistence_threshold"] = PERSISTENT_BELOW
    values["checkpoint"] = {"async_save": False, "layout": "deepspeed", **values.get("checkpoint", {})}
    return values


def _nest_dotted(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with literal keys such as "zero_optimization.reduce_bucket_size", which TRL writes, in their sections.

    They fill in what is missing or "auto" there. Sizes are cut to whole elements: TRL writes 0.9 x hidden size squared.
    """
    values = {key: value for key, value in given.items() if "." not in key}
    for key in (key for key in given if "." in key):
        section, _, name = key.partition(".")
        inner = values.get(section, {})
        if section not in nested(Config) or not isinstance(inner, Mapping):
            values[key] = given[key]
        elif name not in inner or is_auto(inner[name]):
            value = given[key]
            cut = name.endswith(("_bucket_size", "_threshold")) and isinstance(value, float)
            values[section] = {**inner, name: int(value) if cut else value}
    return values


def _refuse_invalid(given: Mapping[str, Any]) -> None:
    """Raise the published error of a wrong section."""
    param_dict = dict(given)
    zero = get_zero_config({**param_dict, "zero_optimization": _without_native(param_dict.get("zero_optimization", {}))})
    half, bfloat = get_float16_config(param_dict), get_bfloat16_config(param_dict)
    assert not (half.enabled and bfloat.enabled), "fp16.enabled: true beside bf16.enabled; choose one"
    for name, on in (("fp16.fp16_master_weights_and_grads", half.fp16_master_weights_and_grads),
                     ("bf16.bf16_master_weights_and_grads", bfloat.bf16_master_weights_and_grads)):
        assert not on or zero.stage, f"{name}: needs a ZeRO stage of 1 to 3"
    get_monitor_config(param_dict)
    DeepSpeedCommsConfig(param_dict)
    refuse_other_batch(param_dict)


def _without_native(section: object) -> object:
    """Return `zero_optimization` without the keys that only Shoal has."""
    if not isinstance(section, Mapping):
        return section
    known = {*DeepSpeedZeroConfig.model_fields,
             *(field.alias for field in DeepSpeedZeroConfig.model_fields.values() if field.alias)}
    native = {*nested(Config)["zero_optimization"].model_fields} - known
    return {key: value for key, value in section.items() if key not in native}


def _known(kind: type[Section], values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the items of `values` that Shoal knows and that have an effect; warn of the others."""
    inner = nested(kind)
    found: dict[str, Any] = {}
    for key, value in values.items():
        where = join(path, key)
        inert = INERT.get(join(path, key.removeprefix("stage3_")))
        name = kind.aliases.get(key, key)
        if inert is not None and _dropped(inert, value, known=name in kind.model_fields):
            _warn_inert(where, value, inert)
        elif name in inner and isinstance(value, Mapping):
            found[key] = _known(inner[name], cast("Mapping[str, Any]", value), where)
        elif name in kind.model_fields or name in kind.published or kind.rewrite({key: value}).values != {key: value}:
            found[key] = value
        else:
            warn_unknown(kind, key, where)
    return found


def _dropped(inert: Inert, value: object, *, known: bool) -> bool:
    """Whether the engine does not read a key of this row, which Shoal's own configuration has if it is `known`."""
    if not known:
        return True
    return inert.for_scripts and not (isinstance(value, Mapping) and inert.native & {*cast("Mapping[str, Any]", value)})


def _warn_inert(where: str, value: object, inert: Inert) -> None:
    if inert.default is not None and value is not None and not is_auto(value) and value != inert.default:
        warn_once(f"{where}: got {shown(value)}, which has no effect: {inert.reason}")


def warn_unknown(kind: type[Section], key: str, where: str) -> None:
    """Warn once that `key` of a section, at the path `where`, has no effect; with the nearest key of `kind`."""
    match = nearest(key, [*kind.model_fields, *kind.published, *kind.aliases])
    homes = [name for name, section in nested(kind).items() if key in {*section.model_fields, *section.published}]
    hint = f"did you mean '{homes[0]}.{key}'?" if homes else f"did you mean '{match}'?" if match else (
        "`shoal config reference` lists the keys")
    warn_once(f"{where}: unknown key, which has no effect; {hint}")


def _resolve_averaging(values: dict[str, Any]) -> None:
    """Drop the defaults of `prescale_gradients` and `gradient_predivide_factor`, which exclude each other in Shoal."""
    if values.get("gradient_predivide_factor") in (1, None):
        values.pop("gradient_predivide_factor", None)
    if values.get("prescale_gradients") and "gradient_predivide_factor" in values:
        del values["gradient_predivide_factor"]
    elif "gradient_predivide_factor" in values:
        values.pop("prescale_gradients", None)

