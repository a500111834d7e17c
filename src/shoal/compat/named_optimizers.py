"""Optimizers named in a published configuration are instances of the published classes.

    adam, adamw   FusedAdam, or DeepSpeedCPUAdam where the state is offloaded; torch's own with `torch_adam`
    adagrad       DeepSpeedCPUAdagrad where the state is offloaded
    lamb          FusedLamb
    lion          FusedLion, or DeepSpeedCPULion where the state is offloaded

Each of them is registered with Shoal under its class name, and steps in the same native code as Shoal's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.compat.deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad
from shoal.compat.deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from shoal.compat.deepspeed.ops.adam.fused_adam import FusedAdam
from shoal.compat.deepspeed.ops.lamb.fused_lamb import FusedLamb
from shoal.compat.deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from shoal.compat.deepspeed.ops.lion.fused_lion import FusedLion
from shoal.optim import register_optimizer

__all__ = ["rename"]

for _kind in (FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, FusedLamb, FusedLion, DeepSpeedCPULion):
    register_optimizer(_kind.__name__, native=True)(_kind)

ON_DEVICE = {"adam": FusedAdam, "adamw": FusedAdam, "lamb": FusedLamb, "lion": FusedLion}
ON_HOST = {**ON_DEVICE, "adam": DeepSpeedCPUAdam, "adamw": DeepSpeedCPUAdam, "adagrad": DeepSpeedCPUAdagrad,
           "lion": DeepSpeedCPULion}
"""The published class of each name, with the state on the device and offloaded."""

TORCH_KEYS = ("torch_adam", "fused", "foreach", "maximize")
"""Keywords that ask for torch's own class."""


def rename(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` with the optimizer named by its published class, and with the keywords that the class takes."""
    section = config.get("optimizer")
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        return config
    name, params = section["type"].lower(), dict(section.get("params") or {})
    if not params.get("max_grad_norm"):
        params.pop("max_grad_norm", None)
    offloaded = ((config.get("zero_optimization") or {}).get("offload_optimizer") or {}).get("device") not in (None, "none")
    kind = (ON_HOST if offloaded else ON_DEVICE).get(name)
    if kind is None or any(params.get(key) for key in TORCH_KEYS) or "max_grad_norm" in params:
        return config
    for key in TORCH_KEYS:
        params.pop(key, None)
    if name.startswith("adam"):
        decoupled = params.pop("adam_w_mode", params.pop("adamw_mode", True)) or name == "adamw"
        params["adamw_mode" if offloaded else "adam_w_mode"] = decoupled
    if not offloaded:
        params.pop("fp32_optimizer_states", None)
    return config | {"optimizer": {**section, "type": kind.__name__, "params": params}}
