"""Published helpers of training loops."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal import comm
from shoal.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shoal.compat.deepspeed.utils.logging import logger
from shoal.tree import tree_map

__all__ = ["CheckOverflow", "DummyOptim", "PartitionedTensor", "call_to_str", "clip_grad_norm_",
           "clip_tensors_by_global_norm", "empty_cache", "ensure_directory_exists", "get_global_norm",
           "get_global_norm_of_tensors", "get_grad_norm", "get_only_unique_item", "get_weight_norm", "has_inf_or_nan",
           "is_invalid_grad_norm", "is_model_parallel_parameter", "memory_status", "move_to_device", "noop_decorator",
           "partition_balanced", "partition_uniform", "prefix_sum_inc", "see_memory_usage", "set_random_seed"]

PIPE_REPLICATED = "ds_pipe_replicated"
GIB = 1 << 30
CLIP_EPSILON = 1e-6


class DummyOptim:
    """An optimizer of parameters that steps nothing."""

    def __init__(self, params: Iterable[nn.Parameter]):
        self.param_groups: list[dict[str, Any]] = [{"params": params}]


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func`."""
    return func


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy where it is loaded, and torch on every device."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text: `f(1, a=2)`."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return nested lists, tuples and dicts with their tensors on `device`; with `criterion_func` those that it accepts."""
    return tree_map(lambda tensor: tensor.to(device) if criterion_func is None or criterion_func(tensor) else tensor, item)


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the one value that all `items` have; raises `RuntimeError` if they differ."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected one value in all items, got {sorted(found, key=repr)}")
    return found.pop()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory in use on rank 0, if `force`."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    device = get_accelerator()
    logger.info("%s", message)
    logger.info("MA %.2f GB         Max_MA %.2f GB         CA %.2f GB         Max_CA %d GB",
                device.memory_allocated() / GIB, device.max_memory_allocated() / GIB, device.memory_cached() / GIB,
                round(device.max_memory_cached() / GIB))
    device.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log the memory in use on rank `print_rank`, -1 for every rank."""
    if print_rank in (-1, dist.get_rank() if dist.is_initialized() else 0):
        see_memory_usage(msg, force=True)


def empty_cache() -> None:
    """Give unused memory of the device back."""
    get_accelerator().empty_cache()


# Partitions of layers


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the running sums."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the borders of parts of nearly equal sizes, the larger ones first."""
    small, larger = divmod(num_items, num_parts)
    return [0, *accumulate(small + (part < larger) for part in range(num_parts))]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the borders of parts whose largest weight is as small as possible."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    sums = [0, *accumulate(weights)]
    # After p rounds, best[i] is the smallest possible (largest part, sum of squares) of the first i items in p parts; of
    # equal cuts the one with the smallest last part counts.
    best = [(total, total**2) for total in sums]
    steps: list[list[int]] = []
    for _ in range(1, num_parts):
        cuts = [min((max(best[j][0], sums[i] - sums[j]), best[j][1] + (sums[i] - sums[j]) ** 2, -j)
                    for j in range(i + 1)) for i in range(len(sums))]
        best = [(largest, squares) for largest, squares, _ in cuts]
        steps.append([-border for *_, border in cuts])
    borders = [len(weights)]
    for row_borders in reversed(steps):
        borders.insert(0, row_borders[borders[0]])
    return [0, *borders]


# Norms


def is_model_parallel_parameter(p: Any) -> bool:
    """Whether a parameter is marked as sliced over tensor ranks, by `model_parallel` or `tensor_model_parallel`."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def _norm(tensors: Iterable[Tensor], norm_type: float) -> float:
    tensors = list(tensors)
    if norm_type == math.inf:
        return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)
    return sum(float(tensor.float().norm(norm_type)) ** norm_type for tensor in tensors) ** (1 / norm_type)


def _over_ranks(total: float, norm_type: float, mpu: Any) -> float:
    """Return a norm of this rank's tensors over the model-parallel ranks of `mpu`."""
    if mpu is None:
        return total
    largest = norm_type == math.inf
    value = torch.tensor([total if largest else total**norm_type])
    comm.all_reduce(value, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, mpu.get_model_parallel_group())
    return float(value) if largest else float(value) ** (1 / norm_type)


def _counted(parameters: Iterable[nn.Parameter], mpu: Any) -> list[nn.Parameter]:
    """Return the parameters that this rank counts: the sliced ones, and on the first model rank the others."""
    first = mpu is None or mpu.get_model_parallel_rank() == 0
    return [parameter for parameter in parameters if not getattr(parameter, PIPE_REPLICATED, False)
            and (first or is_model_parallel_parameter(parameter))]


def clip_grad_norm_(parameters: nn.Parameter | Iterable[nn.Parameter], max_norm: float, norm_type: float = 2,
                    mpu: Any = None) -> Tensor:
    """Scale the gradients of plain parameters down to a norm of `max_norm`; return the norm before. For models without an
    engine, which clips by `gradient_clipping`.
    """
    given = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    with_grad = [parameter for parameter in given if parameter.grad is not None]
    kind = float(norm_type)
    total = _over_ranks(_norm((p.grad for p in _counted(with_grad, mpu) if p.grad is not None), kind), kind, mpu)
    coefficient = min(1.0, max_norm / (total + CLIP_EPSILON))
    for parameter in with_grad:
        assert parameter.grad is not None
        parameter.grad.mul_(coefficient)
    return torch.tensor(total)


def get_grad_norm(parameters: nn.Parameter | Iterable[nn.Parameter], norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the gradients of plain parameters; -1 where it is infinite or NaN."""
    given = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    kind = float(norm_type)
    total = _over_ranks(_norm((p.grad for p in _counted(given, mpu) if p.grad is not None), kind), kind, mpu)
    return total if math.isfinite(total) else -1


def get_weight_norm(parameters: nn.Parameter | Iterable[nn.Parameter], norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the weights; -1 where it is infinite or NaN."""
    given = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
    kind = float(norm_type)
    total = _over_ranks(_norm((p.detach() for p in _counted(given, mpu)), kind), kind, mpu)
    return total if math.isfinite(total) else -1


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the L2 norm of what has these L2 norms."""
    return math.sqrt(sum(norm**2 for norm in norm_list))


def get_global_norm_of_tensors(input_tensors: Iterable[Tensor], norm_type: float = 2, mpu: Any = None,
                               moe_ep_group: Any = None) -> Tensor:
    """Return the norm of all tensors together."""
    return torch.tensor(_over_ranks(_norm(input_tensors, float(norm_type)), float(norm_type), mpu))


def clip_tensors_by_global_norm(input_tensors: Sequence[Tensor], max_norm: float = 1.0, global_norm: Any = None,
                                mpu: Any = None, eps: float = CLIP_EPSILON) -> Tensor:
    """Scale the tensors down to a norm of `max_norm` together; return the norm before."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    coefficient = max_norm / (float(norm) + eps)
    for tensor in input_tensors if coefficient < 1 else ():
        tensor.mul_(coefficient)
    return norm


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return whether a tensor has an infinity or NaN, as a tensor."""
    return x.isfinite().all().logical_not()


def is_invalid_grad_norm(norm: Any) -> bool:
    """Whether a norm is infinite, NaN or -1."""
    return not math.isfinite(float(norm)) or float(norm) == -1


class CheckOverflow:
    """Looks for infinities and NaN in the gradients of plain parameters."""

    def __init__(self, param_groups: Iterable[Iterable[nn.Parameter]] | None = None, mpu: Any = None,
                 zero_reduce_scatter: bool = False, deepspeed: Any = None):
        self.mpu = mpu
        self.params = [parameter for group in param_groups or () for parameter in group]

    def has_overflow_serial(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether a gradient of this rank overflowed."""
        return any(p.grad is not None and bool(has_inf_or_nan(p.grad)) for p in params)

    def has_overflow(self, params: Iterable[nn.Parameter], has_moe_params: bool | None = None) -> bool:
        """Whether a gradient of any rank overflowed."""
        found = torch.tensor([float(self.has_overflow_serial(params))])
        if dist.is_initialized():
            comm.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def check(self, param_groups: Iterable[Iterable[nn.Parameter]] | None = None) -> bool:
        """Whether a gradient of the groups overflowed on any rank."""
        return self.has_overflow([p for group in param_groups for p in group] if param_groups is not None else self.params)


class PartitionedTensor:
    """A tensor of which each rank of `group` keeps one part; `full()` joins them."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, partition_meta: Tensor | None = None):
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.size()), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        start, stop = self.partition[self.rank:self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[start:stop].clone()

    @classmethod
    def from_meta(cls, meta: Tensor, local_part: Tensor, group: dist.ProcessGroup, device: Any = "cpu") -> PartitionedTensor:
        """Return the tensor that `meta` describes, of which this rank has `local_part`."""
        numbers: list[int] = meta.tolist()
        self = cls(torch.empty(0), group)
        dims = numbers[0]
        self.orig_size = numbers[1:1 + dims]
        self.orig_device = torch.device(device)
        self.num_parts, self.rank = numbers[1 + dims], numbers[2 + dims]
        self.partition = numbers[3 + dims:]
        self.local_data = local_part
        return self

    def to_meta(self) -> Tensor:
        """Return what describes the tensor as whole numbers: dims, shape, parts, rank, borders."""
        return torch.tensor([len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition])

    def data(self) -> Tensor:
        """Return this rank's part."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Return the shape of this rank's part."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Return the shape of the whole."""
        return self.orig_size

    def full(self, device: Any = None) -> Tensor:
        """Return the whole; every rank of the group calls it."""
        widest = max(stop - start for start, stop in zip(self.partition, self.partition[1:], strict=False))
        own = self.local_data.new_zeros(widest)
        own[:self.local_data.numel()] = self.local_data
        parts = own.new_empty(widest * self.num_parts)
        comm.all_gather_into_tensor(parts, own, self.group)
        pieces = [parts[rank * widest:rank * widest + stop - start]
                  for rank, (start, stop) in enumerate(zip(self.partition, self.partition[1:], strict=False))]
        return torch.cat(pieces).view(self.orig_size).to(self.orig_device if device is None else device)
