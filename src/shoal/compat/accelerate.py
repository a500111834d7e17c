"""Shoal as an Accelerator, for people who choose it by name; CPUs and GPUs, nothing else to install.

    accelerator = ShoalAccelerator(stage=3, mixed_precision="bf16")         after `from shoal.compat.accelerate import ...`
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

The loop, and all else, is Accelerate's: this class fills the configuration that Accelerate hands to an engine, and lets
Accelerate find Shoal's engine under the published name. Import it before accelerate.
"""
# Accelerate is no dependency of Shoal: where it is missing its types are unknown.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.compat.finder import install

install()  # Accelerate looks for an engine as it is imported

from accelerate import Accelerator, DeepSpeedPlugin, PartialState  # noqa: E402

from shoal.config.load import read  # noqa: E402
from shoal.device import accelerator as device_kind  # noqa: E402
from shoal.errors import UsageError  # noqa: E402

__all__ = ["ShoalAccelerator"]


class ShoalAccelerator(Accelerator):
    """Train by Shoal at a ZeRO `stage`; `offload` keeps masters and moments on the host, `sequence` ranks split a sequence.

    `config` holds further sections of the configuration, as a dict or a path. Batch sizes, accumulation and precision are
    Accelerate's own, as are all other arguments. Raises UsageError beside a plugin of Accelerate's.
    """

    def __init__(self, stage: int = 2, offload: bool = False, config: Mapping[str, Any] | str | None = None, *,
                 sequence: int = 1, gradient_clipping: float = 0.0, **kwargs: Any):
        taken = [name for name in ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin")
                 if kwargs.get(name) is not None]
        if taken:
            raise UsageError(f"ShoalAccelerator: got {taken[0]}; leave it out, and give sections of the "
                             f"configuration as config")
        given: dict[str, Any] = {} if config is None else dict(read(config))
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu" if offload else "none"}}
        sections = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto",
                    "gradient_accumulation_steps": kwargs.get("gradient_accumulation_steps", 1),
                    "gradient_clipping": gradient_clipping, **given,
                    "zero_optimization": {**zero, **given.get("zero_optimization", {})}}
        if sequence > 1:
            from accelerate.parallelism_config import ParallelismConfig

            kwargs.setdefault("parallelism_config", ParallelismConfig(sp_backend="deepspeed", sp_size=sequence))
        PartialState(cpu=device_kind() is None)
        super().__init__(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=sections), **kwargs)
