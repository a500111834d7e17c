"""Parameters that nobody trained when the engine was made have no state here: to train them later is to lose it unseen.

The other way is free. A parameter that is frozen in the middle of training has no gradient from then on, and is passed over
like any that is not used; it goes on where it stood when it is trained again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from shoal.errors import UsageError

__all__ = ["FrozenParamCheck"]

_SHOWN = 3


class FrozenParamCheck:
    """The parameters that do not require gradients, by name."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]):
        self._parameters: Mapping[str, nn.Parameter] = {
            name: parameter for name, parameter in parameters if not parameter.requires_grad}

    def check(self, rank: int) -> None:
        """Raise `UsageError` if one of them requires gradients by now."""
        thawed = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        if thawed:
            more = f" and {len(thawed) - _SHOWN} more" if len(thawed) > _SHOWN else ""
            raise UsageError(
                f"rank {rank}: backward: {', '.join(thawed[:_SHOWN])}{more} required no gradient at initialize: "
                f"there is no state to train it by. Call requires_grad_(False) after initialize, which can be undone at any "
                f"step; or save a checkpoint, and load it into an engine of the model as it is now")
