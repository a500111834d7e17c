"""Published helpers of training loops: norms, overflow, partitions, memory reports."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal.comm
from shoal.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shoal.compat.deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from shoal.compat.deepspeed.utils.logging import logger
from shoal.compat.environment import host_memory
from shoal.compat.partitioned_tensor import PartitionedTensor as PartitionedTensor
from shoal.errors import UsageError

PIPE_REPLICATED = "ds_pipe_replicated"
"""An attribute of parameters that another stage has too, and counts."""

inf = math.inf
noop_context = nullcontext


class DummyOptim:
    """The parameter groups of an optimizer that does not step."""

    def __init__(self, params: Any):
        self.param_groups: list[dict[str, Any]] = [{"params": params}]


def noop_decorator(func: Any) -> Any:
    """Return `func`."""
    return func


def ensure_directory_exists(filename: str) -> None:
    """Create the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text: `call_to_str("f", 1, x=2)` is "f(1, x=2)"."""
    return f"{base}({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the item that all of `items` are. Raises `RuntimeError` if they differ."""
    found = set(items)
    if len(found) != 1:
        raise UsageError(f"get_only_unique_item: got {items}; there must be one value")
    return found.pop()


# Devices


def empty_cache() -> None:
    """Return the accelerator's unused memory to the driver."""
    get_accelerator().empty_cache()


def get_tensor_bytes(item: Tensor) -> int:
    """Return the size of a tensor in bytes."""
    return item.numel() * item.element_size()


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Return `item` with copies on `device` of what the criterion names, within lists, tuples and dicts too."""
    return _mapped(item, criterion_func, lambda tensor: tensor.to(device))


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return `item` with its tensors on `device`; those that the criterion names are changed themselves."""
    def move(parameter: Tensor) -> Tensor:
        moved = parameter.to(device)
        if criterion_func is None:
            return moved
        parameter.data = moved
        return parameter

    return _mapped(item, criterion_func or (lambda each: isinstance(each, Tensor)), move)


def _mapped(item: Any, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    if isinstance(item, Mapping):
        return {key: _mapped(value, wanted, change) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_mapped(value, wanted, change) for value in item)
    return change(item) if wanted(item) else item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory of the accelerator and of the host on rank 0, if `force`."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    device, gb, (used, total) = get_accelerator(), 2 ** 30, host_memory()
    shown = max(logging.INFO, logger.level)
    logger.log(shown, "%s", message)
    logger.log(shown, "MA %.2f GB         Max_MA %.2f GB         CA %.2f GB", device.memory_allocated() / gb,
               device.max_memory_allocated() / gb, device.memory_reserved() / gb)
    logger.log(shown, "CPU Virtual Memory:  used = %.2f GB, percent = %s%%", used / gb, round(100 * used / total, 1))


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log the memory of the accelerator on `print_rank`, -1 for every rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if print_rank in (-1, rank):
        logger.log(max(logging.INFO, logger.level), "RANK=%d MEMSTATS %s device=%s current alloc=%.4fGB", rank, msg,
                   get_accelerator().current_device_name(), get_accelerator().memory_allocated() / 2 ** 30)


def get_ma_status() -> int:
    """Return the accelerator's bytes in use."""
    return get_accelerator().memory_allocated()


# Partitions


def prefix_sum_inc(weights: Sequence[Any]) -> list[Any]:
    """Return the running sums of `weights`, each with its own item."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` parts of equal sizes; the first ones take what remains."""
    size, rest = divmod(num_items, num_parts)
    return [part * size + min(part, rest) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` runs of `weights` whose sums differ least; a run has one item or more.

    The best division of the first items is kept for each number of parts, by the distance of its largest and smallest sum.
    """
    items = len(weights)
    if items <= num_parts:
        return partition_uniform(items, num_parts)
    total = [0, *accumulate(weights)]
    best: list[_Division | None] = [None, *(_Division(total[end], total[end], total[end] ** 2, (0, end))
                                            for end in range(1, items + 1))]
    for parts in range(2, num_parts + 1):
        after: list[_Division | None] = [None] * (items + 1)
        for end in range(parts, items + 1):
            options = (before.extended(total[end] - total[start], end) for start in range(end - 1, parts - 2, -1)
                       if (before := best[start]) is not None)
            after[end] = min(options, key=lambda division: division.cost)
        best = after
    found = best[items]
    assert found is not None
    return list(found.bounds)


class _Division:
    """A division of the first items: the largest, the smallest and the squared sums of its parts, and their bounds."""

    def __init__(self, largest: float, smallest: float, squares: float, bounds: tuple[int, ...]):
        self.largest, self.smallest, self.squares, self.bounds = largest, smallest, squares, bounds
        self.cost = (largest - smallest, squares)

    def extended(self, weight: float, end: int) -> _Division:
        """Return this division with one more part."""
        return _Division(max(self.largest, weight), min(self.smallest, weight), self.squares + weight ** 2,
                         (*self.bounds, end))


# Norms and overflow


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether a parameter is a slice of a tensor-parallel one."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return whether a value is infinite or NaN, as a tensor."""
    return torch.logical_not(torch.isfinite(x)).any()


def is_invalid_grad_norm(norm: Any) -> bool:
    """Whether a norm is infinite, NaN, or the -1 that marks an overflow."""
    value = float(norm)
    return value == -1 or not math.isfinite(value)


def mask_nan_or_inf_with_val_inplace(input: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Replace infinite and NaN values by `val`."""
    input.masked_fill_(~torch.isfinite(input), val)


def filter_empty_parameters(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that have elements."""
    return [each for each in params if each.numel() > 0]


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """Return the stage-3 parameters that are released."""
    return [each for each in param_list if str(getattr(each, "ds_status", "")).endswith("NOT_AVAILABLE")]


def maybe_loss_for_backward(value: Any) -> bool:
    """Whether a value is a scalar with a graph."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None


def align_dense_tensors(tensor_list: list[Tensor], alignment: int) -> list[Tensor]:
    """Return the tensors, followed by zeros where their elements are no multiple of `alignment`."""
    rest = -sum(each.numel() for each in tensor_list) % alignment
    last = tensor_list[-1] if rest else None
    return tensor_list if last is None else [*tensor_list, torch.zeros(rest, dtype=last.dtype, device=last.device)]


def compare_tensors_in_structures(inputs1: Any, inputs2: Any) -> bool:
    """Whether two lists or dicts have equal tensors at the same places."""
    if type(inputs1) is not type(inputs2):
        return False
    if isinstance(inputs1, dict):
        return inputs1.keys() == inputs2.keys() and compare_tensors_in_structures(
            list(inputs1.values()), [inputs2[key] for key in inputs1])
    if not isinstance(inputs1, list) or len(inputs1) != len(inputs2):
        return False
    return all(torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
               for one, other in zip(inputs1, inputs2, strict=True))


def get_global_norm(norm_list: Iterable[Any]) -> float:
    """Return the 2-norm of norms."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norm_list))


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _counted(parameters: Iterable[Any], mpu: Any) -> list[Any]:
    """Return the parameters that this rank counts in a norm over the model-parallel ranks."""
    first = bwc_tensor_model_parallel_rank(mpu) == 0 if mpu is not None else True
    return [each for each in parameters
            if not getattr(each, PIPE_REPLICATED, False) and (first or is_model_parallel_parameter(each))]


def _total(tensors: Sequence[Tensor], norm_type: float, mpu: Any) -> Tensor:
    """Return the norm of all elements of `tensors` over the model-parallel ranks, in fp32."""
    norm_type = float(norm_type)
    norms = [torch.linalg.vector_norm(tensor.detach().float(), norm_type) for tensor in tensors]
    together = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float32)
    if norm_type == inf:
        return _over_model_ranks(together.max(), dist.ReduceOp.MAX, mpu)
    return _over_model_ranks((together ** norm_type).sum(), dist.ReduceOp.SUM, mpu) ** (1.0 / norm_type)


def _over_model_ranks(value: Tensor, op: Any, mpu: Any) -> Tensor:
    group = None if mpu is None else mpu.get_model_parallel_group()
    if group is not None and dist.get_world_size(group) > 1:
        shoal.comm.all_reduce(value, op=op, group=group)
    return value


def get_grad_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of all gradients, over the model-parallel ranks of `mpu`; -1 if it is infinite or NaN."""
    norm = float(_total([each.grad for each in _counted(_listed(parameters), mpu) if each.grad is not None], norm_type, mpu))
    return norm if math.isfinite(norm) else -1.0


def get_flattened_grad_norm(parameters: Any, norm_type: float = 2, mpu: Any = None, grad_norm_mask: Any = None) -> float:
    """Return the norm of all gradients, over the model-parallel ranks of `mpu`; -1 if it is infinite or NaN."""
    if grad_norm_mask:
        raise UsageError("get_flattened_grad_norm: got grad_norm_mask; mask the gradients themselves, and leave it out")
    return get_grad_norm(parameters, norm_type, mpu)


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of all weights, over the model-parallel ranks of `mpu`; -1 if it is infinite or NaN."""
    norm = float(_total(_counted(_listed(parameters), mpu), norm_type, mpu))
    return norm if math.isfinite(norm) else -1.0


def get_grad_zeros(parameters: Any, mpu: Any = None) -> float:
    """Return the number of elements of the gradients that are zero."""
    zeros = sum(int((each.grad == 0).sum()) for each in _counted(_listed(parameters), mpu) if each.grad is not None)
    return float(_over_model_ranks(torch.tensor(float(zeros), dtype=torch.float32), dist.ReduceOp.SUM, mpu))


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; return the norm before."""
    found = [each for each in _listed(parameters) if each.grad is not None]
    norm = _total([each.grad for each in _counted(found, mpu)], norm_type, mpu)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for each in found:
        each.grad.detach().mul_(factor.to(each.grad.device))
    return norm


def get_global_norm_of_tensors(input_tensors: Iterable[Tensor], norm_type: float = 2, mpu: Any = None,
                               moe_ep_group: Any = None) -> Tensor:
    """Return the norm of all elements of tensors, over the model-parallel ranks of `mpu`; -1 if it is infinite or NaN."""
    norm = _total(list(input_tensors), norm_type, mpu)
    mask_nan_or_inf_with_val_inplace(norm)
    return norm


def clip_tensors_by_global_norm(input_tensors: Sequence[Tensor], max_norm: float = 1.0, global_norm: Any = None,
                                mpu: Any = None, eps: float = 1e-6) -> Any:
    """Scale tensors so that their norm is at most `max_norm`; return the norm before."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    if max_norm / (float(norm) + eps) < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(max_norm / (float(norm) + eps))
    return norm


class CheckOverflow:
    """Looks for infinite and NaN gradients, on all ranks."""

    def __init__(self, param_groups: Any = None, mpu: Any = None, zero_reduce_scatter: bool = False, deepspeed: Any = None):
        self.mpu = mpu
        self.params = None if param_groups is None else [each for group in param_groups for each in group]
        self.zero_reduce_scatter = zero_reduce_scatter
        self.deepspeed = deepspeed
        self.has_moe_params = False

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        """Whether one of the norms marks an overflow, on any rank."""
        found = any(is_invalid_grad_norm(norm) for norm in norm_group)
        return self._on_any_rank(found) if reduce_overflow else found

    def check(self, param_groups: Any = None) -> bool:
        """Whether a gradient overflows, of these groups or those of the constructor."""
        params = self.params if param_groups is None else [each for group in param_groups for each in group]
        if params is None:
            raise TypeError("CheckOverflow.check: got no param_groups, here or in the constructor")
        return self.has_overflow(params)

    def has_overflow_serial(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether a gradient overflows on this rank."""
        return any(bool(has_inf_or_nan(each.grad)) for each in params if each.grad is not None)

    def has_overflow(self, params: Iterable[nn.Parameter], has_moe_params: bool | None = None) -> bool:
        """Whether a gradient overflows on any rank."""
        return self._on_any_rank(self.has_overflow_serial(params))

    @staticmethod
    def _has_inf_or_nan(x: Tensor, i: int) -> Tensor:
        return has_inf_or_nan(x)

    def _on_any_rank(self, found: bool) -> bool:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return found


        flag = torch.tensor([float(found)], dtype=torch.float32, device=get_accelerator().current_device_name())
        shoal.comm.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


# Checkpoint folders


def _get_folder_size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def get_checkpoint_folder_size(save_dir: str, tag: str, local_rank: int | None = None) -> int:
    """Return the bytes of a checkpoint's files; on another local rank than 0, 0."""
    return _get_folder_size(str(Path(save_dir) / str(tag))) if local_rank in (None, 0) else 0
