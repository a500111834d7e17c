"""A recompute gets the random numbers and buffers of its forward; writes to its saved tensors in between are found.

    random states    those before the forward, while the recompute runs
    buffers          those before the forward, in copies that the recompute updates
    saved tensors    a write in place after autograd saved one raises at backward, as in plain PyTorch

The copy of a large buffer in host memory shares its memory until one of the two is written to, so that a buffer that nobody
writes to costs nothing. Elsewhere, and of memory that torch did not allocate, the forward begins with a copy of the bytes,
which is kept if the forward wrote to the buffer; else the recompute copies the buffer as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from shoal.activation.random_states import TRACKER, AllStates, ReenteredContext
from shoal.device import on_accelerator
from shoal.errors import UsageError

__all__ = ["Replay", "replayed"]

_SMALL = 1 << 16
"""Bytes up to which a copy of a buffer has memory of its own, and is kept though no write to the buffer was counted."""


class Replay:
    """One forward and its recomputes: each backward through a kept graph has its own."""

    def __init__(self, name: str, modules: Iterable[nn.Module]):
        """The forward of `name`, which runs `modules`, begins."""
        self._states = AllStates.of(TRACKER)
        self._buffers = _Buffers(name, modules)
        self._saved = _SavedVersions(name)

    @contextmanager
    def forward(self) -> Generator[None]:
        """Run the forward within the context."""
        with self._saved.forward():
            yield
        self._buffers.end_forward()

    @contextmanager
    def recompute(self) -> Generator[None]:
        """Run a recompute within the context."""
        with self._states.replayed(TRACKER), self._buffers.apart(), self._saved.recompute():
            yield


def replayed(name: str, modules: Iterable[nn.Module]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a forward of `name`, which begins now, and of its recomputes, for torch's checkpoint."""
    if not torch.is_grad_enabled():
        return nullcontext(), nullcontext()
    replay = Replay(name, modules)
    return replay.forward(), ReenteredContext(replay.recompute)


@dataclass(slots=True, kw_only=True)
class _Buffer:
    """A buffer as it was before a forward."""

    path: str
    tensor: Tensor
    version: int
    values: Tensor | None
    """A copy; None where the buffer has these values still, or had none."""

    @classmethod
    def of(cls, tensor: Tensor, path: str) -> _Buffer:
        if is_lazy(tensor):  # the forward gives it a shape
            return cls(path=path, tensor=tensor, version=-1, values=None)
        return cls(path=path, tensor=tensor, version=_version(tensor), values=_copy(tensor))

    @property
    def is_written(self) -> bool:
        return _version(self.tensor) != self.version

    @property
    def costs_memory(self) -> bool:
        """Whether the copy has much memory of its own without need."""
        return (self.values is not None and not self.is_written and _is_large(self.values)
                and not torch._C._is_cow_tensor(self.values))  # pyright: ignore  it has no annotation

    def at_start(self, block: str) -> Tensor:
        """Return a copy for a recompute. Raises `UsageError` where none was kept and the buffer has other values now."""
        if self.values is None and self.version >= 0 and self.is_written:
            raise UsageError(f"recompute: the buffer '{self.path}' of {block}, of shape {tuple(self.tensor.shape)}, was "
                             f"written to in place after a forward that did not write to it, so that backward cannot "
                             f"compute the block again; write to it in the forward, or after backward")
        return _copy(self.tensor if self.values is None else self.values, self.tensor.requires_grad)


class _Buffers:
    """The buffers of modules before a forward."""

    def __init__(self, block: str, modules: Iterable[nn.Module]):
        self._block = block
        self._found: dict[int, _Buffer] = {}
        """By the identity of the buffer: several modules may share one."""
        roots = list(modules)
        self._before = [(module, _buffers(module)) for root in roots for module in root.modules()]
        for root in roots:
            for path, tensor in root.named_buffers():
                self._found[id(tensor)] = _Buffer.of(tensor, path)

    def end_forward(self) -> None:
        """Give the memory of copies back that nobody needs."""
        for each in self._found.values():
            if each.costs_memory:
                each.values = None

    @contextmanager
    def apart(self) -> Generator[None]:
        """Within the context the modules update copies; afterwards they have their own buffers, as they are now."""
        copies = {key: each.at_start(self._block) for key, each in self._found.items()}
        now = [(module, _buffers(module)) for module, _ in self._before]
        for module, buffers in self._before:
            _exchange(module, {name: None if each is None else copies[id(each)] for name, each in buffers.items()})
        try:
            yield
        finally:
            for module, buffers in now:
                _exchange(module, buffers)


def _buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module without those of its children; None is one that has no values yet."""
    return dict(module._buffers.items())  # pyright: ignore[reportPrivateUsage]  a public name leaves out None


def _exchange(module: nn.Module, buffers: dict[str, Tensor | None]) -> None:
    """Let a module have these buffers."""
    present = _buffers(module)
    for name in present.keys() - buffers.keys():
        del module._buffers[name]  # pyright: ignore[reportPrivateUsage]  delattr forgets that it is not persistent
    for name, buffer in buffers.items():
        if name not in present or present[name] is not buffer:
            module._buffers[name] = buffer  # pyright: ignore[reportPrivateUsage]  setattr takes a new name as an attribute


def _copy(tensor: Tensor, requires_grad: bool = False) -> Tensor:
    """Return a copy without a graph; a large one on the host has no memory of its own until one of the two is written to."""
    source = tensor.detach()
    if requires_grad:
        return source.requires_grad_().clone()  # no leaf: the forward may write to it
    if _is_large(source) and not on_accelerator(source):
        try:
            return torch._lazy_clone(source)  # pyright: ignore  it has no annotation
        except RuntimeError:  # memory that torch did not allocate: of numpy, or shared between processes
            pass
    return source.clone()


def _is_large(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes > _SMALL


class _SavedVersions:
    """The versions of the tensors that autograd saves in a recompute, in the order in which the forward saved them.

    Backward gets what the recompute saved. torch's checkpoint does not see that it was written to since.
    """

    def __init__(self, name: str):
        self._name = name
        self._versions: list[int] = []

    @contextmanager
    def forward(self) -> Generator[None]:
        """Compare versions where backward asks for what the checkpoint saves within the context."""
        pack, unpack = _checkpoint_hooks()
        numbers = count()

        def number(tensor: Tensor) -> tuple[int, Any]:
            return next(numbers), pack(tensor)

        def compare(saved: tuple[int, Any]) -> Tensor:
            tensor = unpack(saved[1])
            if saved[0] < len(self._versions) and _version(tensor) != self._versions[saved[0]]:
                raise UsageError(f"recompute: {self._name} wrote in place to a tensor of shape {tuple(tensor.shape)} and "
                                 f"{tensor.dtype} after autograd had saved it, so that backward has other values than the "
                                 f"forward; write to a copy (`tensor.clone()`) instead")
            return tensor

        with _hooks_of_checkpoint(number, compare, like=pack):
            yield

    @contextmanager
    def recompute(self) -> Generator[None]:
        """Note the versions of what autograd saves within the context."""
        pack, unpack = _checkpoint_hooks()
        self._versions = versions = []

        def note(tensor: Tensor) -> Any:
            versions.append(_version(tensor))
            return pack(tensor)

        with _hooks_of_checkpoint(note, unpack, like=pack):
            yield


def _checkpoint_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Return the innermost saved-tensor hooks: torch's checkpoint enters its contexts within its own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore  it has no annotation
    assert hooks is not None
    return hooks


def _hooks_of_checkpoint(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], *,
                         like: Callable[..., Any]) -> saved_tensors_hooks:
    """Return hooks that are known as those of a checkpoint, as `like` is (`autograd.saved_by_checkpoint`)."""
    pack.__module__ = like.__module__
    return saved_tensors_hooks(pack, unpack)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
