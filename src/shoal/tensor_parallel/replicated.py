"""Modules whose parameters are whole, used on a part of the data: norms and dropout between cut regions, norms of heads."""

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
    """Any module of parameters of its own (a norm), applied by every rank to its part of the data.

    Its parameters keep their names and are whole; their gradients are summed over the ranks, in one message of
    2 n (N-1)/N bytes a backward pass, for n bytes of parameters and N ranks. Takes the module over.

    With `sequence_dim` its input is split along that dim. Where all ranks have the whole of it instead, each has the whole
    gradient already, and their sum is too large: the first backward raises `UsageError`, by `name`.
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
        self._template = (module,)  # in a tuple, so that the parameters have one home, and names without a prefix
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
        """See in the next backward that this rank's gradient is an addend, if `x` is such that parts of it differ."""
        assert self._dim is not None
        if not torch.is_grad_enabled() or not _varies(x, self._dim):
            return
        self._checked = True
        for name, tensor in shared.items():
            sight = _Sight(self._name, name, self._axis.ranks)
            tensor.register_hook(sight.addend)
            sight.handle = trained[name].register_hook(sight.total)

    def extra_repr(self) -> str:
        return f"{self._template[0]}, rank {self._axis.rank} of {self._axis.ranks}"


class _Sight:
    """Looks once at the gradient of a parameter on this rank, and at the sum over the ranks that comes after it."""

    def __init__(self, module: str, name: str, ranks: int):
        self._module, self._name, self._ranks = module, name, ranks
        self._addend: Tensor | None = None
        self.handle: RemovableHandle | None = None

    def addend(self, gradient: Tensor) -> None:
        self._addend = gradient

    def total(self, gradient: Tensor) -> None:
        """Raise `UsageError` if each rank had the whole gradient."""
        addend, self._addend = self._addend, None
        if addend is None or self.handle is None:
            return
        self.handle.remove()
        whole, precision = addend * self._ranks, torch.finfo(gradient.dtype).eps
        if bool(whole.any()) and torch.allclose(gradient, whole, rtol=self._ranks * precision, atol=0):
            raise UsageError(f"{self._module}: Norm() where sequences are not split: each of {self._ranks} ranks has the "
                             f"whole gradient of '{self._name}', and their sum would be {self._ranks} times that. {_FIX}")


class PartDropout(nn.Dropout):
    """Dropout of a part of a tensor: every rank of the axis drops other elements.

    With `sequence_dim` the tensor is split along that dim. Where all ranks have the whole of it instead, they would have
    other values behind it: the first call in training raises `UsageError`, by `name`.
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
        """See that the ranks have other values."""
        assert self._dim is not None
        self._checked = True
        bits = bits_of(x, ordered=True) if _varies(x, self._dim) else None
        words = self._axis.all_gather(torch.tensor([bits or 0], device=x.device)).wait().flatten().tolist()
        if bits is not None and len(set(words)) == 1:
            raise UsageError(f"{self._name}: Dropout() where sequences are not split: {len(words)} ranks have the same "
                             f"values, and each would drop others of them. {_FIX}")


def _varies(x: Tensor, dim: int) -> bool:
    """Whether its parts along `dim` may differ."""
    return bool((x != x.narrow(dim, 0, 1)).any())
