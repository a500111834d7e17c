"""Synchronize buffers over the data ranks: all get rank 0's values, as in DistributedDataParallel.

All ranks begin with rank 0's. Forwards then change some on every rank, each from its own samples: the running statistics of
BatchNorm. After each step those that have changed on rank 0 are sent to the others, so that an evaluation, a checkpoint and
the next step find the same everywhere. Buffers that are in no state dict are caches, and stay each rank's own; so do
sparse ones, which are not saved in checkpoints either.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]  of all norms with statistics

from shoal.log import warn_once
from shoal.module_hooks import is_scripted
from shoal.transport.collectives import Communicator
from shoal.zero.ownership import owner_of

__all__ = ["BufferSync", "is_array", "move_buffers"]


def move_buffers(model: nn.Module, communicator: Communicator, device: torch.device) -> None:
    """Move buffers, and parameters that no unit has, to the device, and give all data ranks rank 0's values of them.

    No unit has parameters of whole numbers, quantised ones, and those of no elements.
    """
    _take_out_of_inference(model)
    others = [(name, parameter) for name, parameter in model.named_parameters() if owner_of(parameter) is None]
    for name, buffer in [*model.named_buffers(), *others]:
        buffer.data = buffer.data.to(device)
        if not is_array(buffer):
            warn_once(f"initialize: the buffer '{name}' of the {type(model).__name__} has the layout {buffer.layout}, and "
                      f"is neither sent to other ranks nor saved in checkpoints: build it alike on all ranks and before "
                      f"a resume, or keep a dense one")
        elif buffer.numel():
            values = buffer.data.contiguous()
            communicator.broadcast(values, 0, f"buffer '{name}'")
            buffer.data.copy_(values)


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
        persistent = set(model.state_dict(keep_vars=True))
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


def is_array(buffer: Tensor) -> bool:
    """Whether the bytes of a tensor are its values."""
    return buffer.layout is torch.strided and not buffer.is_nested
