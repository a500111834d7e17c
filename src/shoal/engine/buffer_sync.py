"""Synchronize buffers over the data ranks: all get rank 0's values, as in DistributedDataParallel.

All ranks begin with rank 0's. Forwards then change some on every rank, each from its own samples: the running statistics of
BatchNorm. After each step those that have changed on rank 0 are sent to the others, so that an evaluation, a checkpoint and
the next step find the same everywhere. Buffers that are in no state dict are caches, and stay each rank's own; so do
sparse ones, which are not saved in checkpoints either. A quantised parameter is a buffer too: codes, and the scales beside
them, the tensors among the attributes of a parameter of a class of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]  of all norms with statistics

from shoal.errors import RanksDisagree
from shoal.log import warn_once
from shoal.module_hooks import is_scripted
from shoal.transport.collectives import Communicator
from shoal.zero.ownership import owner_of

__all__ = ["BufferSync", "is_array", "move_buffers", "saved_names"]


def move_buffers(model: nn.Module, communicator: Communicator, device: torch.device) -> None:
    """Move buffers, and parameters that no unit has, to the device, and give all data ranks rank 0's values of them.

    No unit has parameters of whole numbers, quantised ones, and those of no elements. Raises `RanksDisagree` where the codes
    or the scales of a quantised one have other shapes or dtypes than rank 0's.
    """
    _take_out_of_inference(model)
    others = [(name, parameter) for name, parameter in model.named_parameters() if owner_of(parameter) is None]
    for _, parameter in others:
        _move_quantised(parameter, device)
    seen = set[int]()  # parameters may share a table
    scales = [(f"{name}, {at}", scale) for name, parameter in others for at, scale in _scales(parameter, seen)]
    _check_codes(communicator, [*others, *scales])
    for name, buffer in [*model.named_buffers(), *others, *scales]:
        buffer.data = buffer.data.to(device)
        if not is_array(buffer):
            warn_once(f"initialize: the buffer '{name}' of the {type(model).__name__} has the layout {buffer.layout}, and "
                      f"is neither sent to other ranks nor saved in checkpoints: build it alike on all ranks and before "
                      f"a resume, or keep a dense one")
        elif buffer.numel():
            values = buffer.data.contiguous()
            communicator.broadcast(values, 0, f"buffer '{name}'")
            buffer.data.copy_(values)


@torch.no_grad()
def _move_quantised(parameter: nn.Parameter, device: torch.device) -> None:
    """Have a parameter of a class of its own move itself, in place: its `to` moves its scales too, or quantises it first."""
    if type(parameter) is nn.Parameter:
        return
    moved = parameter.to(device)
    if moved is not parameter:
        parameter.data = moved.data
        vars(parameter).update(vars(moved))


def _scales(parameter: nn.Parameter, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors beside a parameter of a class of its own, each once, with their places among its attributes."""
    if type(parameter) is not nn.Parameter:
        for at, tensor in _tensors(vars(parameter), "", seen):
            if tensor.data_ptr() != parameter.data_ptr():  # an attribute may be the codes
                yield at, tensor


def _tensors(value: object, at: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of strided memory in `value`: itself, in containers, and in attributes of what is no module."""
    if id(value) in seen or isinstance(value, nn.Module | type | ModuleType | FunctionType):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if is_array(value) and not value.is_meta:
            yield at, value
        return
    inside = value if isinstance(value, Mapping) else (
        dict(enumerate(value)) if isinstance(value, list | tuple) else getattr(value, "__dict__", {}))
    for key, each in inside.items():
        yield from _tensors(each, f"{at}.{key}" if at else str(key), seen)


def _check_codes(communicator: Communicator, found: Sequence[tuple[str, Tensor]]) -> None:
    """Raise unless all ranks have tensors of equal shapes and dtypes beside their units: they are about to be sent."""
    said = communicator.gather_objects([f"'{name}' {tuple(each.shape)} {each.dtype}" for name, each in found])
    for rank, theirs in enumerate(said):
        if theirs != said[0]:
            here, there = next(pair for pair in zip_longest(said[0], theirs, fillvalue="nothing") if pair[0] != pair[1])
            raise RanksDisagree(f"initialize: ranks have different parameters of codes, of whole numbers or of no elements: "
                                f"rank 0 has {here}, rank {rank} has {there}; build and quantise the model alike on every "
                                f"rank")


def _take_out_of_inference(model: nn.Module) -> None:
    """Replace buffers made in inference mode: nothing outside of it may write to one, as loading a checkpoint does."""
    replaced: dict[Tensor, Tensor] = {}  # several modules may share one
    for module in model.modules():
        for key, buffer in [*module.named_buffers(recurse=False)]:
            if buffer.is_inference():
                setattr(module, key, replaced.setdefault(buffer, buffer.clone()))


class BufferSync:
    """Sends rank 0's changed buffers to the data ranks."""

    def __init__(self, model: nn.Module, communicator: Communicator):
        persistent = saved_names(model)
        self._communicator = communicator
        self._places = [(module, key) for path, module in model.named_modules() for key, buffer in module.named_buffers(
            recurse=False) if is_array(buffer) and buffer.numel() and (f"{path}.{key}" if path else key) in persistent]
        self._seen = self._versions()

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return self._communicator.ranks > 1 and bool(self._places)

    @torch.no_grad()
    def sync(self) -> None:
        """Give all data ranks the buffers that have changed on rank 0 since the last call. A collective call."""
        now, device = self._versions(), self._buffer(0).device
        changed = torch.tensor([new != old or self._writes_uncounted(index) for index, (new, old) in enumerate(zip(
            now, self._seen, strict=True))], dtype=torch.uint8, device=self._communicator.words_device)
        self._communicator.broadcast(changed, 0, "which buffers have changed")
        chosen = [self._buffer(index) for index, is_changed in enumerate(changed.tolist()) if is_changed]
        if chosen:
            flat = torch.cat([buffer.detach().to(device).contiguous().view(-1).view(torch.uint8) for buffer in chosen])
            self._communicator.broadcast(flat, 0, "changed buffers")
            for buffer, values in zip(chosen, flat.split([buffer.nbytes for buffer in chosen]), strict=True):
                buffer.data.copy_(values.clone().view(buffer.dtype).view(buffer.shape))
        self._seen = self._versions()

    def _buffer(self, index: int) -> Tensor:
        module, key = self._places[index]
        return getattr(module, key)

    def _versions(self) -> list[tuple[int, int]]:
        """Return a value that changes when a buffer is written, or replaced by another tensor."""
        buffers = (self._buffer(index) for index in range(len(self._places)))
        return [(id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in buffers]

    def _writes_uncounted(self, index: int) -> bool:
        """Whether a forward may write to the buffer without a count: torch counts no writes of its kernels for running
        statistics, which TorchScript may call anywhere, and none to a tensor made in inference mode.
        """
        module = self._places[index][0]
        return ((module.training and (isinstance(module, _NormBase) or is_scripted(module)))
                or self._buffer(index).is_inference())


def saved_names(model: nn.Module) -> set[str]:
    """Return the names that the modules of `model` save; hooks of `state_dict` may rename them, or read released weights."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        module._save_to_state_dict(found, f"{path}." if path else "", True)  # pyright: ignore[reportPrivateUsage]  no hooks
    return set(found)


def is_array(buffer: Tensor) -> bool:
    """Whether the bytes of a tensor are its values."""
    return buffer.layout is torch.strided and not buffer.is_nested
