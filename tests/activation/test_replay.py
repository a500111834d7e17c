"""A recompute begins with the buffers of its forward, however these were written to, and leaves those that are there now."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal import checkpointing
from shoal.errors import UsageError

WIDTH = 8
LARGE = 1 << 15
"""Elements of a buffer whose copy shares its memory."""


class _Block(nn.Module):
    """A block that scales by a buffer, which a subclass changes."""

    def __init__(self, size: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(size))

    def change(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        return x + self.down((self.up(x) * self.scale[:WIDTH].clone()).tanh())


class _WritesPastVersions(_Block):
    def change(self) -> None:
        self.scale.data.mul_(1.5)


class _Replaces(_Block):
    """The buffer comes with a graph."""

    def __init__(self, size: int = WIDTH) -> None:
        super().__init__(size)
        self.weight = nn.Parameter(torch.ones(size))

    def change(self) -> None:
        self.scale = self.scale.detach() * self.weight * 2


class _FillsNone(_Block):
    def __init__(self, size: int = WIDTH) -> None:
        super().__init__(size)
        self._buffers["scale"] = None

    def change(self) -> None:
        self.scale = torch.full((WIDTH,), 0.5) if self.scale is None else self.scale * 1.5


class _Registers(_Block):
    def change(self) -> None:
        if "rate" not in self._buffers:
            self.register_buffer("rate", torch.full((), 0.5), persistent=False)
        self.rate.mul_(1.5)
        self.scale.mul_(self.rate)


class _Deletes(_Block):
    def change(self) -> None:
        if "scale" in self._buffers:
            scale = self.scale
            del self.scale
            self.scale = nn.Buffer(scale * 2)


class _Grows(_Block):
    def change(self) -> None:
        self.scale.resize_(2 * WIDTH)[WIDTH:] = 1


class _IsWrittenToLater(_Block):
    """A script writes to the buffer between forward and backward."""


class _ReadsTable(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down((self.up(x) * self.scale.narrow(0, 3, WIDTH)).tanh())


class _Scripted(_Block):
    def __init__(self, size: int = WIDTH) -> None:
        super().__init__(size)
        self.up = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))


class _Lazy(_Block):
    def __init__(self, size: int = WIDTH) -> None:
        super().__init__(size)
        self.up = nn.Sequential(self.up, nn.LazyBatchNorm1d())


def _trained(kind: type[_Block], size: int, call: Any) -> tuple[list[Tensor], dict[str, Tensor], set[str]]:
    torch.manual_seed(0)
    block = kind(size)
    gradients: list[Tensor] = []
    for _ in range(3):
        x = torch.randn(4, WIDTH, requires_grad=True)
        loss = call(block, x).square().sum()
        if kind is _IsWrittenToLater:
            block.scale.mul_(3)
        loss.backward()
        gradients += [x.grad, *(parameter.grad.clone() for parameter in block.parameters())]
    return gradients, dict(block.named_buffers()), block._non_persistent_buffers_set


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:`torch.jit.script` is deprecated", "ignore:Non-empty")
@pytest.mark.parametrize("size", [WIDTH, LARGE])
@pytest.mark.parametrize("kind", [_WritesPastVersions, _Replaces, _FillsNone, _Registers, _Deletes, _IsWrittenToLater,
                                  _Scripted, _Lazy, _Grows])
def test_gradients_and_buffers_are_those_without_recompute(kind: type[_Block], size: int) -> None:
    if kind is _Grows and size == LARGE:
        pytest.skip("torch cannot give a tensor whose memory is shared more memory")
    gradients, buffers, hidden = _trained(kind, size, checkpointing.checkpoint)
    expected, theirs, unsaved = _trained(kind, size, lambda block, x: block(x))
    assert all(map(torch.equal, gradients, expected))
    assert buffers.keys() == theirs.keys() and all(map(torch.equal, buffers.values(), theirs.values()))
    assert hidden == unsaved


class _Copies(TorchDispatchMode):
    """Counts the bytes of large copies."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and output.numel() >= LARGE:
            self.bytes += output.nbytes
        return output


def test_a_large_buffer_that_nobody_writes_to_is_not_copied() -> None:
    block, x = _ReadsTable(LARGE), torch.randn(4, WIDTH, requires_grad=True)
    table = block.scale
    with _Copies() as copies:
        loss = checkpointing.checkpoint(block, x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert copies.bytes == 0
    assert block.scale is table and torch._C._is_cow_tensor(table)  # torch copies the memory where it is written to


def test_a_late_write_to_a_buffer_in_memory_of_others_is_refused() -> None:
    block, x = _Block(), torch.randn(4, WIDTH, requires_grad=True)
    block.scale = torch.from_numpy(numpy.ones(LARGE, dtype=numpy.float32))
    checkpointing.checkpoint(block, x).sum().backward()
    loss = checkpointing.checkpoint(block, x).sum()
    block.scale.mul_(2)
    with pytest.raises(UsageError, match=r"recompute: the buffer 'scale' of _Block, of shape \(32768,\), was written to in"):
        loss.backward()


def test_a_call_without_gradients_copies_nothing() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    with torch.no_grad():
        state = torch.get_rng_state()
        checkpointing.checkpoint(norm, torch.randn(4, WIDTH))
    assert int(norm.num_batches_tracked) == 1 and not torch.equal(state, torch.get_rng_state())
