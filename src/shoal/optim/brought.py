"""The optimizer's state where it rests on disk, as a mapping that reads: each look brings a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.optim.views import View, Views
from shoal.tier import Kept, held

__all__ = ["Brought"]


class Brought(Mapping[Tensor, dict[str, Any]]):
    """The state of each of the optimizer's parameters; what is written into a moment that rests on disk is lost."""

    def __init__(self, views: Views, optimizer: Optimizer):
        self._views = {view.parameter: view for view in views.views}
        self._state = optimizer.state

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        state = self._state[parameter]
        view = self._views.get(parameter)  # type: ignore[arg-type]  every parameter of ours is one
        return state if view is None else {kind: _brought(view, kind, value) for kind, value in state.items()}

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _brought(view: View, kind: str, value: Any) -> Any:
    assert view.unit.state is not None
    span = view.unit.state.moments.get(kind)
    if span is None or isinstance(span, Kept):
        return value
    with held(span, view.start, view.stop, changed=False) as moment:
        return moment.clone()
