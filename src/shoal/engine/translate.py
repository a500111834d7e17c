"""What the configuration says to each part, in that part's own words."""

from __future__ import annotations

import torch
from torch import nn

from shoal.engine.optimizer_traits import OptimizerTraits
from shoal.engine.schema import Config
from shoal.optim.registry import prefers_native
from shoal.optim.rules import StepRules
from shoal.precision.loss_scale import LossScale, StaticScale, make_loss_scale
from shoal.precision.policy import Averaging, Policy, policy
from shoal.transport.collectives import Communicator
from shoal.zero.sharded import ShardingPlan

__all__ = ["loss_scale_of", "plan_of", "policy_of", "rules_of"]


def policy_of(settings: Config, model: nn.Module, stepping: OptimizerTraits, data: Communicator) -> Policy:
    """Return the dtypes in which `model` computes, and its gradients rest and travel over `data`."""
    accumulate = settings.data_types.grad_accum_dtype
    if stepping.compressing and accumulate is None:  # what signs do not say would be rounded away
        accumulate = "fp32" if settings.fp16.enabled or settings.bf16.enabled else None
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    averaging = Averaging(prescale=settings.prescale_gradients, predivide=settings.gradient_predivide_factor,
                          wide=not data.native, times=data.ranks if settings.gradient_allreduce_op == "sum" else 1)
    return policy(fp16=settings.fp16.enabled, bf16=settings.bf16.enabled, model_dtype=dtypes[0] if dtypes else torch.float32,
                  communication_data_type=settings.communication_data_type, grad_accum_dtype=accumulate,
                  averaging=averaging)


def plan_of(settings: Config, stepping: OptimizerTraits) -> ShardingPlan:
    """Return how the model is sharded, and how far its weights run ahead."""
    zero = settings.zero_optimization
    param = zero.offload_param
    return ShardingPlan(stage=zero.stage, signs=stepping.compressing, overlap=zero.overlap_comm,
                ahead=zero.stage3_prefetch_bucket_size,
                live=zero.stage3_max_live_parameters, persistent_below=zero.stage3_param_persistence_threshold,
                persistent_at_most=zero.stage3_model_persistence_threshold, reuse=zero.stage3_max_reuse_distance,
                reads=param.buffer_count - 1, read_elements=param.buffer_count * param.buffer_size,
                in_backward=bool(zero.offload_optimizer.step_in_backward), by_rows=settings.sparse_gradients)


def rules_of(settings: Config, dtypes: Policy, stepping: OptimizerTraits, *, named: bool) -> StepRules:
    """Return how a step is taken, by an optimizer that the configuration `named` or by another."""
    overflows = stepping.compressing or torch.float16 in (dtypes.compute, dtypes.reduce)
    zero, offload = settings.zero_optimization, settings.zero_optimization.offload_optimizer
    ahead = (offload.buffer_count - 1) // 2 if offload.pipeline_read else 0
    native = named and prefers_native(settings.optimizer.type, settings.optimizer.params)
    return StepRules(clipping=settings.gradient_clipping, check_overflow=overflows
                     or (settings.bf16.enabled and settings.bf16.check_grad_overflow),
                     unused=zero.ignore_unused_parameters, at_once=zero.sub_group_size,
                     native=native,
                     ahead=ahead, behind=offload.buffer_count - 1 - ahead if offload.pipeline_write else 0,
                     in_backward=bool(offload.step_in_backward))


def loss_scale_of(settings: Config) -> LossScale:
    """Return what losses are multiplied by; 1 without fp16."""
    fp16 = settings.fp16
    if not fp16.enabled:
        return StaticScale(1.0)
    return make_loss_scale(loss_scale=fp16.loss_scale, initial_scale_power=fp16.initial_scale_power,
                           loss_scale_window=fp16.loss_scale_window, hysteresis=fp16.hysteresis,
                           consecutive_hysteresis=fp16.consecutive_hysteresis, min_loss_scale=fp16.min_loss_scale)
