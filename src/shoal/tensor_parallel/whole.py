"""Modules whose parameters are whole, used on a part of the data: norms and dropout between cut regions, norms of heads."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.tensor_parallel.axis import Axis
from shoal.tensor_parallel.random import Apart
from shoal.tensor_parallel.regions import share

__all__ = ["PartDropout", "Shared"]


class Shared(nn.Module):
    """Any module of parameters of its own (a norm), applied by every rank to its part of the data.

    Its parameters keep their names and are whole; their gradients are summed over the ranks, in one message of
    2 n (N-1)/N bytes a backward pass, for n bytes of parameters and N ranks. Takes the module over.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup):
        super().__init__()
        if any(True for _ in module.children()):
            raise UsageError(f"Shared: {type(module).__name__} has modules within it; wrap those that have parameters, one "
                             f"by one")
        self._axis = Axis(group)
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
        module._buffers.update(buffers)
        module._parameters.update(own | shared)
        try:
            return module(*args, **kwargs)
        finally:
            module._parameters.update(own)

    def train(self, mode: bool = True) -> Shared:
        self._template[0].train(mode)
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"{self._template[0]}, rank {self._axis.rank} of {self._axis.ranks}"


class PartDropout(nn.Dropout):
    """Dropout of a part of a tensor: every rank of the axis drops other elements."""

    def __init__(self, p: float = 0.5, inplace: bool = False, *, group: dist.ProcessGroup):
        super().__init__(p, inplace)
        self._apart = Apart(dist.get_rank(group))

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        with self._apart.fork(input.device):
            return super().forward(input)
