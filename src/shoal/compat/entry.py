"""`initialize` as published: Shoal's engine, configured with the published tolerance."""

from __future__ import annotations

from typing import Any

from shoal.engine.build import add_config_arguments
from shoal.engine.build import initialize as native_initialize

__all__ = ["add_config_arguments", "initialize"]


def initialize(args: Any = None, model: Any = None, optimizer: Any = None, model_parameters: Any = None,
               training_data: Any = None, lr_scheduler: Any = None, distributed_port: int = 29500, mpu: Any = None,
               dist_init_required: bool | None = None, collate_fn: Any = None, config: Any = None, mesh_param: Any = None,
               config_params: Any = None) -> tuple[Any, Any, Any, Any]:
    """Wrap `model` for training; returns the engine, its optimizer, the loader and the schedule, None where absent."""
    return native_initialize(args=args, model=model, optimizer=optimizer, model_parameters=model_parameters,
                             training_data=training_data, lr_scheduler=lr_scheduler, distributed_port=distributed_port,
                             mpu=mpu, dist_init_required=dist_init_required, collate_fn=collate_fn, config=config,
                             mesh_param=mesh_param, config_params=config_params)
