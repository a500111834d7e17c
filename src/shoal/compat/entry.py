"""`initialize` as published: it chooses the published engine's class, and returns the engine with its parts."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from shoal.compat.assembly import tp_model_init
from shoal.compat.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from shoal.compat.engine import DeepSpeedEngine
from shoal.compat.optimizers import PlainOptimizer
from shoal.compat.pipeline_engine import PipelineEngine
from shoal.compat.raising import as_published
from shoal.compat.unsupported import unsupported_function
from shoal.pipeline.module import PipelineModule

__all__ = ["add_config_arguments", "default_inference_config", "init_inference", "initialize", "tp_model_init"]


@as_published
def initialize(args: Any = None, model: Any = None, optimizer: Any = None, model_parameters: Any = None,
               training_data: Any = None, lr_scheduler: Any = None, distributed_port: int = 29500, mpu: Any = None,
               dist_init_required: bool | None = None, collate_fn: Any = None, config: Any = None, mesh_param: Any = None,
               config_params: Any = None) -> tuple[Any, Any, Any, Any]:
    """Wrap `model` for training; returns the engine, its optimizer, the loader and the schedule, None where absent.

    In fp32 at stage 0 the optimizer is the torch optimizer itself, as published; at stage 3 without an optimizer it is the
    `DeepSpeedZeRoOffload`. Raises Shoal's errors, which are also of the published types.
    """
    kind = PipelineEngine if isinstance(model, PipelineModule) else DeepSpeedEngine
    engine = kind.assembled(
        args=args, model=model, optimizer=optimizer, model_parameters=model_parameters, training_data=training_data,
        lr_scheduler=lr_scheduler, distributed_port=distributed_port, mpu=mpu, dist_init_required=dist_init_required,
        collate_fn=collate_fn, config=config, mesh_param=mesh_param, config_params=config_params)
    stepped: Any = engine.optimizer
    if type(stepped) is PlainOptimizer:
        stepped = optimizer if isinstance(optimizer, Optimizer) else stepped.as_inner()
    if stepped is None and engine.zero_optimization_partition_weights():
        stepped = DeepSpeedZeRoOffload(engine.module)
    return engine, stepped, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: Any) -> Any:
    """Add `--deepspeed` and `--deepspeed_config` to an argparse parser, and return it."""
    group = parser.add_argument_group("DeepSpeed", "distributed training")
    group.add_argument("--deepspeed", action="store_true", default=False, help="accepted; the launcher starts the ranks")
    group.add_argument("--deepspeed_config", type=str, default=None, help="the JSON configuration")
    group.add_argument("--deepscale", action="store_true", default=False, help="the oldest spelling of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, help="the oldest spelling of --deepspeed_config")
    return parser


init_inference = unsupported_function("init_inference", "generate with the module of a training engine, or with vLLM")
default_inference_config = unsupported_function("default_inference_config", "there is no inference engine")
