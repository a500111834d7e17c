"""Extra state of modules: what their `get_extra_state` returns, which is neither a parameter nor a buffer.

torch's `state_dict` has it under the module's name and `SUFFIX`. Layers in fp8 and quantisers keep their scales there. It is
any value that `values.py` encodes, the same on every data rank; a checkpoint holds that of rank 0 of each pipeline stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shoal.tree import tree_map

__all__ = ["SUFFIX", "extra_states", "load_extra_states"]

SUFFIX = "_extra_state"


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return the extra state of each module of `model` that has one, tensors on the CPU, by its name in the state dict."""
    return {name: tree_map(_to_host, module.get_extra_state()) for name, module in _modules(model).items()}


def load_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Give each module of `model` its extra state; `states` may hold other names too."""
    for name, module in _modules(model).items():
        if name in states:
            module.set_extra_state(states[name])


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {f"{path}.{SUFFIX}" if path else SUFFIX: module for path, module in model.named_modules(remove_duplicate=False)
            if type(module).get_extra_state is not nn.Module.get_extra_state}


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
