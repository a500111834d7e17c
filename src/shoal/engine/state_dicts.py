"""The state dicts that a script asks an engine for, of the model and of the optimizer, and the files of weights among them.

Each call begins as a call of the engine, checks its arguments, and converts by `full_state_dict` or `full_optimizer_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.engine import full_optimizer_state, full_state_dict
from shoal.errors import UsageError
from shoal.optim.sharded import ShardedOptimizer
from shoal.zero.sharded import ShardedModel

__all__ = ["StateDicts"]


class StateDicts:
    """The state dicts of one engine. `begin_call` names a call for errors, and raises after `destroy`."""

    def __init__(self, sharded: ShardedModel, begin_call: Callable[[str], None]):
        self._sharded = sharded
        self._begin_call = begin_call

    def consolidate(self, dtype: torch.dtype | None, *, exclude_frozen: bool) -> dict[str, Tensor] | None:
        """See `Accessors.consolidated_state_dict`."""
        self._begin_call("consolidated_state_dict")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):  # pyright: ignore[reportUnnecessaryIsInstance]  scripts pass names
            raise UsageError(f"consolidated_state_dict: dtype: got {dtype!r}; give a floating-point torch.dtype, such as "
                             f"torch.float32, or None for the parameters' own")
        return full_state_dict.consolidate(self._sharded, dtype, exclude_frozen=exclude_frozen)

    def save(self, file: Path, *, exclude_frozen: bool) -> None:
        """Save the weights, in their own dtypes, as one file that `torch.load` reads; every rank calls it, rank 0 writes."""
        state = self.consolidate(None, exclude_frozen=exclude_frozen)
        if state is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, file)

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype | None, options: dict[str, Any]) -> None:
        """See `Accessors.save_pretrained`."""
        state = self.consolidate(dtype, exclude_frozen=False)
        error = full_state_dict.save_pretrained(self._sharded.model, state, folder, dtype, options)
        errors = [text for text in self._sharded.parameter_groups.world.gather_objects(error) if text]
        if errors:
            raise UsageError(f"save_pretrained: {errors[0]}")

    def of_module(self, destination: dict[str, Any] | None, prefix: str, *, keep_vars: bool,
                  exclude_frozen: bool) -> dict[str, Any]:
        """See `Accessors.module_state_dict`."""
        state: dict[str, Any] = {} if destination is None else destination
        self._sharded.model.state_dict(destination=state, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen:
            full_state_dict.remove_frozen(state, self._sharded.model, prefix)
        return state

    def load(self, checkpoint: Mapping[str, Any], *, strict: bool, custom_load_fn: Any) -> None:
        """See `Accessors.load_module_state_dict`."""
        self._begin_call("load_module_state_dict")
        if custom_load_fn is not None:
            raise UsageError("load_module_state_dict: custom_load_fn is not supported: parameters may be sharded; write "
                             "within `with shoal.gathered(engine.module, modifier_rank=0)` instead")
        if not isinstance(checkpoint, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  scripts pass None
            raise UsageError(f"load_module_state_dict: got a {type(checkpoint).__name__}; give every rank the state dict, a "
                             f"mapping of names to tensors (consolidated_state_dict returns it on rank 0 alone)")
        inner = checkpoint.get("module")
        full_state_dict.load(self._sharded, inner if isinstance(inner, Mapping) else checkpoint, strict=strict)

    def of_optimizer(self, optimizer: ShardedOptimizer) -> dict[str, Any]:
        """Return the portable state dict of `optimizer`: the same as `optimizer.state_dict()`."""
        self._begin_call("optimizer.state_dict")
        return full_optimizer_state.consolidate(self._sharded, optimizer)

    def load_optimizer(self, optimizer: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
        """Load a portable state dict into `optimizer`: the same as `optimizer.load_state_dict(state_dict)`."""
        self._begin_call("optimizer.load_state_dict")
        full_optimizer_state.load(self._sharded, optimizer, state_dict)
