"""The optimizer's state where it rests on disk, as a mapping that reads: each look brings a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.optim.views import MasterView, Views
from shoal.tier import ResidentSpan, fetched

__all__ = ["OffloadedStateView"]


class OffloadedStateView(Mapping[Tensor, dict[str, Any]]):
    """The state of each of the optimizer's parameters; what is written into a moment that rests on disk is lost."""

    def __init__(self, views: Views, optimizer: Optimizer, settle: Callable[[], None]):
        self._views = views
        self._state = optimizer.state
        self._settle = settle

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        self._settle()
        if parameter not in self._state:
            raise KeyError(parameter)
        state: dict[str, Any] = self._state[parameter]
        view = next((view for view in self._views.views if view.parameter is parameter), None)
        if view is None or view.unit.state.store.granule is None:
            return state
        return {kind: _brought(view, kind, value) for kind, value in state.items()}

    def __iter__(self) -> Iterator[Tensor]:
        self._settle()
        return iter(self._state)

    def __len__(self) -> int:
        self._settle()
        return len(self._state)


def _brought(view: MasterView, kind: str, value: Any) -> Any:
    span = view.unit.state.moments.get(kind)
    if span is None or isinstance(span, ResidentSpan):
        return value
    with fetched(span, view.start, view.stop, changed=False) as moment:
        return moment.clone()
