"""From what a user hands over to optimizer groups: which parameter is stepped with which options.

Parameters may come as an optimizer instance, as groups, or as plain tensors. The groups keep their order and options;
their parameters are later replaced by views of the masters that rest on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.optim.views import Views

Factory = Callable[[list[dict[str, Any]]], Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The options of each group, and the group of each parameter."""

    options: tuple[dict[str, Any], ...]
    of: dict[nn.Parameter, int]

    @classmethod
    def collect(cls, model: nn.Module, parameters: Iterable[Tensor | Mapping[str, Any]] | None) -> Groups:
        """Divide `parameters` (tensors or group dicts; None or empty: all trainable ones of `model`) into groups."""
        given: list[Any] = list(parameters) if parameters is not None else []
        given = given or [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not given or not isinstance(given[0], Mapping):
            given = [{"params": given}]
        names = {parameter: name for name, parameter in model.named_parameters()}
        options: list[dict[str, Any]] = []
        groups: dict[nn.Parameter, int] = {}
        for index, group in enumerate(cast("list[Mapping[str, Any]]", given)):
            params: Any = group["params"]
            for entry in [params] if isinstance(params, Tensor) else params:
                parameter = entry[1] if isinstance(entry, tuple) else entry
                if not isinstance(parameter, nn.Parameter) or parameter not in names:
                    raise UsageError(f"optimizer group {index}: got a tensor of shape {tuple(parameter.shape)} that is no "
                                     f"parameter of the model; pass parameters of the model given to initialize")
                if parameter in groups:
                    raise UsageError(f"optimizer group {index}: parameter '{names[parameter]}' appears a second time "
                                     f"(first in group {groups[parameter]}); each parameter belongs to one group")
                groups[parameter] = index
            options.append({key: value for key, value in group.items() if key != "params"})
        return cls(options=tuple(options), of={p: group for p, group in groups.items() if p.requires_grad})

    def build(self, factory: Factory, views: Views) -> Optimizer:
        """Build the optimizer over the views of the masters."""
        return factory([{**options, "params": views.of_group(index)} for index, options in enumerate(self.options)])

    @staticmethod
    def check_new(optimizer: Optimizer) -> None:
        """Raise `UsageError` if the optimizer has stepped: its state would be that of whole parameters."""
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):
            raise UsageError(f"initialize: the {type(optimizer).__name__} has stepped already and holds state for whole "
                             f"parameters; pass it before its first step, or resume from a checkpoint")

    def rebind(self, optimizer: Optimizer, views: Views) -> Optimizer:
        """Have an optimizer of the user's step the views in place of the model's parameters."""
        self.check_new(optimizer)
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = views.of_group(index)
        if optimizer.state:  # made before the first step, as Adagrad makes it: made again, for the views
            fresh = type(optimizer)(optimizer.param_groups, **{name: value for name, value in optimizer.defaults.items()
                                                               if name in signature(type(optimizer)).parameters})
            optimizer.state.clear()
            optimizer.state.update(fresh.state)
        return optimizer
