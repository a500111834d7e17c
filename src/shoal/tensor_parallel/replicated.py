"""Modules whose parameters are whole and whose input is a slice: norms and dropout in a split sequence, norms of heads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.errors import UsageError
from shoal.tensor_parallel.axis import Axis, eager
from shoal.tensor_parallel.random import Apart
from shoal.tensor_parallel.regions import share
from shoal.tree import bits_of

__all__ = ["PartDropout", "Shared"]

_FIX = ("Take its pattern out of the plan, or put it between Sequence(split=) and where gather_output ends the split "
        "sequence")


class Shared(nn.Module):
    """Wraps a leaf module (a norm) that each rank applies to its part of the data.

    Its parameters keep their names and stay whole; one all-reduce sums their gradients over the ranks, which sends
    2 n (N-1)/N bytes a backward pass, for n bytes of parameters and N ranks.

    With `sequence_dim` the input is split along that dim. If instead all ranks have the whole input, each has the whole
    gradient already and the sum is N times too large: the first backward raises `UsageError` with the module's `name`.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, name: str = "", sequence_dim: int | None = None):
        super().__init__()
        if any(True for _ in module.children()):
            raise UsageError(f"Shared: {type(module).__name__} has modules within it; wrap those that have parameters, one "
                             f"by one")
        self._axis = Axis(group)
        self._name = name or type(module).__name__
        self._dim = sequence_dim
        self._checked = self._dim is None or self._axis.ranks == 1
        self._template = (module,)  # in a tuple, so that it is no submodule and the parameters have no prefix
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self._template[0]
        own, buffers = dict(self.named_parameters(recurse=False)), dict(self.named_buffers(recurse=False))
        trained = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
        shared: dict[str, Any] = dict(zip(trained, share(self._axis, *trained.values()), strict=True)) if trained else {}
        if shared and not self._checked:
            self._check((*args, *kwargs.values())[0], trained, shared)
        module._buffers.update(buffers)
        module._parameters.update(own | shared)
        try:
            return module(*args, **kwargs)
        finally:
            module._parameters.update(own)

    def train(self, mode: bool = True) -> Shared:
        self._template[0].train(mode)
        return super().train(mode)

    @eager
    def _check(self, x: Tensor, trained: dict[str, nn.Parameter], shared: dict[str, Tensor]) -> None:
        """Check in the next backward that this rank's gradient is an addend; only if parts of `x` differ."""
        assert self._dim is not None
        if not torch.is_grad_enabled() or not _varies(x, self._dim):
            return
        self._checked = True
        for name, tensor in shared.items():
            check = _AddendCheck(self._name, name, self._axis.ranks)
            tensor.register_hook(check.record_addend)
            check.handle = trained[name].register_hook(check.compare_total)

    def extra_repr(self) -> str:
        return f"{self._template[0]}, rank {self._axis.rank} of {self._axis.ranks}"


class _AddendCheck:
    """Compares once the gradient of a parameter on this rank with the sum over the ranks."""

    def __init__(self, module: str, name: str, ranks: int):
        self._module, self._name, self._ranks = module, name, ranks
        self._addend: Tensor | None = None
        self.handle: RemovableHandle | None = None

    def record_addend(self, gradient: Tensor) -> None:
        self._addend = gradient

    def compare_total(self, gradient: Tensor) -> None:
        """Raise `UsageError` if the sum is N times this rank's gradient, so that each rank had the whole one."""
        addend, self._addend = self._addend, None
        if addend is None or self.handle is None:
            return
        self.handle.remove()
        whole, precision = addend * self._ranks, torch.finfo(gradient.dtype).eps
        if bool(whole.any()) and torch.allclose(gradient, whole, rtol=self._ranks * precision, atol=0):
            raise UsageError(f"{self._module}: Norm() where sequences are not split: each of {self._ranks} ranks has the "
                             f"whole gradient of '{self._name}', and their sum would be {self._ranks} times that. {_FIX}")


class PartDropout(nn.Dropout):
    """Dropout of a part of a tensor: each rank of the axis draws its own mask.

    With `sequence_dim` the tensor is split along that dim. If instead all ranks have the whole tensor, their values would
    differ afterwards: the first call in training raises `UsageError` with the module's `name`.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, group: dist.ProcessGroup, name: str = "",
                 sequence_dim: int | None = None):
        super().__init__(p, inplace)
        self._apart = Apart(dist.get_rank(group))
        self._axis = Axis(group)
        self._name = name or "Dropout"
        self._dim = sequence_dim
        self._checked = self._dim is None or self._axis.ranks == 1

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        if not self._checked:
            self._check(input)
        with self._apart.fork(input.device):
            return super().forward(input)

    @eager
    def _check(self, x: Tensor) -> None:
        """Raise `UsageError` if all ranks have the same values."""
        assert self._dim is not None
        self._checked = True
        bits = bits_of(x, ordered=True) if _varies(x, self._dim) else None
        word = torch.tensor([bits or 0], dtype=torch.int64, device=x.device)
        words = self._axis.all_gather(word).wait().flatten().tolist()
        if bits is not None and len(set(words)) == 1:
            raise UsageError(f"{self._name}: Dropout() where sequences are not split: {len(words)} ranks have the same "
                             f"values, and each would drop others of them. {_FIX}")


def _varies(x: Tensor, dim: int) -> bool:
    """Return whether parts of `x` along `dim` may differ."""
    return bool((x != x.narrow(dim, 0, 1)).any())
