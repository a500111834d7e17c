"""The owner of a parameter: what holds the memory of its data, and answers for its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["GradReader", "Owner", "clear_owner", "owner_of", "set_owner"]


class GradReader(Protocol):
    """Answers for the attribute `grad` of parameters."""

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of `parameter`."""
        ...

    def write(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Replace the gradient of `parameter`."""
        ...


class Owner(Protocol):
    """The owner of a parameter's memory."""

    @property
    def serves_reads(self) -> bool:
        """Whether `read` would bring back the memory at present."""
        ...

    @property
    def grads(self) -> GradReader | None:
        """The reader of `grad` at present; None where scripts find the attribute that autograd writes."""
        ...

    def read(self, parameter: nn.Parameter, operation: str, operands: Sequence[Tensor] = ()) -> None:
        """Bring back the memory of `parameter`, or raise. What the operation's other `operands` have in memory stays."""
        ...

    def copy(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return a copy of the released `parameter` that has an owner of its own; None: `read` serves the copy."""
        ...

    def copy_at_rest(self, parameter: nn.Parameter, source: nn.Parameter) -> bool:
        """Copy the values of the released `source` to the released `parameter`, and gather neither.

        Return False, and do nothing, where they do not rest alike: `read` serves the copy.
        """
        ...

    def close(self) -> None:
        """Give up the resting state: the parameters have another owner."""
        ...


_owners = WeakIdKeyDictionary()
_kept = WeakIdKeyDictionary()


def set_owner(parameter: nn.Parameter, owner: Owner, *, keep: bool = False) -> None:
    """Record that `owner` holds the memory of `parameter` from now on; with `keep` the parameter keeps it alive.

    The former owner, if it was kept alive, is closed.
    """
    _owners[parameter] = ref(owner)
    former: Owner | None = _kept.pop(parameter, None)
    if former is not None:
        former.close()
    if keep:
        _kept[parameter] = owner


def clear_owner(parameter: nn.Parameter) -> None:
    """Record that the parameter holds its own memory again."""
    _owners.pop(parameter, None)


def owner_of(parameter: Tensor) -> Owner | None:
    """Return the owner of the parameter's memory; None if it owns its memory."""
    reference = cast("ReferenceType[Owner] | None", _owners.get(parameter))
    return None if reference is None else reference()
