"""A recompute has the random numbers and buffers of its forward, and saved tensors that nobody wrote to since.

    random states    those before the forward, while the recompute runs
    buffers          copies of the values before the forward, which the recompute updates; kept of those that it wrote to
    saved tensors    a write in place after autograd saved one raises at backward, as in plain PyTorch
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.activation.random_states import TRACKER, AllStates, ReenteredContext
from shoal.errors import UsageError

__all__ = ["Replay", "replayed"]


class Replay:
    """One forward and its recomputes: each backward through a kept graph has its own."""

    def __init__(self, name: str, modules: Iterable[nn.Module]):
        """The forward of `name`, which runs `modules`, begins."""
        self._states = AllStates.of(TRACKER)
        self._buffers = _Buffers(modules)
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
    replay = Replay(name, modules)
    return replay.forward(), ReenteredContext(replay.recompute)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffer:
    """A buffer as it was before a forward."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    values: Tensor | None
    """A copy; None where the forward did not write to it."""

    @property
    def is_written(self) -> bool:
        """Whether the module has another buffer by now, or other values in it."""
        now = self.module._buffers.get(self.name)  # pyright: ignore[reportPrivateUsage]  not of a parametrization
        return now is not self.tensor or _version(self.tensor) != self.version


class _Buffers:
    """The buffers of modules before a forward."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._found = [
            _Buffer(module=module, name=name, tensor=buffer, version=_version(buffer), values=buffer.detach().clone())
            for root in modules for module in root.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)]

    def end_forward(self) -> None:
        """Keep the values of those that the forward wrote to."""
        self._found = [each if each.is_written else replace(each, values=None) for each in self._found]

    @contextmanager
    def apart(self) -> Generator[None]:
        """Within the context the modules update copies; afterwards they have their own buffers, as they are now."""
        now = [(each, each.module._buffers.get(each.name)) for each in self._found]  # pyright: ignore[reportPrivateUsage]
        copies: dict[int, Tensor] = {}  # one of each buffer, however many modules share it
        for each, buffer in now:
            if id(each.tensor) not in copies:
                copies[id(each.tensor)] = (each.tensor if each.values is None else each.values).detach().clone()
            if buffer is not None:
                setattr(each.module, each.name, copies[id(each.tensor)])
        try:
            yield
        finally:
            for each, buffer in now:
                if buffer is not None:
                    setattr(each.module, each.name, buffer)


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
