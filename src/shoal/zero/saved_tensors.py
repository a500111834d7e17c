"""Saved-tensor hooks: autograd saves a weight as a view of its unit's buffer, and the unit is gathered when it is unpacked.

Other tensors may rest outside the compute device in between (`SavedActivations`).

The hooks are on in the forward of a model and within `gathered`, where weights that are released later may be read. Autograd
checks the version of tensors that it keeps itself, but not of tensors that a hook hands back, so this file checks them. A
step, a load or an edit counts as a write to weights, as in plain training (`VersionCounters.mark`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.activation import RestingView, SavedActivations, end_interrupted
from shoal.activation.saved import version_witness
from shoal.autograd import in_backward, saved_by_checkpoint
from shoal.errors import TierError, UsageError
from shoal.zero.compiled import opaque, uncompiled
from shoal.zero.unit import Unit

__all__ = ["SavedTensorTracker", "tracked"]


_units: dict[int, ReferenceType[Unit]] = {}
"""The units of this process whose weights are released between uses, by the storage of their buffer."""


def _track(units: Mapping[int, Unit]) -> None:
    """Add `units`, by the storage of their buffer, and forget those that are gone."""
    for storage in [storage for storage, unit in _units.items() if unit() is None]:
        del _units[storage]
    _units.update((storage, ref(unit)) for storage, unit in units.items())


@dataclass(slots=True, kw_only=True, eq=False)
class SavedTensor:
    """A tensor as it was when autograd saved it; apart from its node, for one that held itself would never be freed.

    It is not frozen: that would double the time to make one, and autograd saves a tensor in most operations.
    """

    tensor: Tensor
    version: int
    unit: Unit
    """The unit of the module in whose forward that was, or of the context."""

    @property
    def _error_words(self) -> tuple[str, str]:
        """The name of the tensor in an error, and the way out."""
        what = f"a tensor of shape {self._shape} and {self.tensor.dtype}, saved in the forward around unit"
        return f"{what} '{self.unit.name}',", "write to a copy (clone()) instead"

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def unchanged(self) -> Tensor:
        """Return the tensor; raises `UsageError` if it was written to since."""
        if self.tensor._version != self.version:
            what, instead = self._error_words
            raise UsageError(f"rank {self.unit.communicator.rank}: backward needs {what} that was written to in place after "
                             f"forward had used it; {instead}")
        return self.tensor


uncompiled(SavedTensor.__init__)


@dataclass(slots=True, kw_only=True, eq=False)
class SavedWeight(SavedTensor):
    """A view of a parameter in the buffer of its unit; kept as numbers: a tensor would count as a storage user."""

    view: tuple[Sequence[int], Sequence[int], int]
    """Its shape, its strides, and where it begins in the buffer."""

    @property
    def _error_words(self) -> tuple[str, str]:
        name = next((slot.name for slot in reversed(self.unit.layout.slots) if slot.start <= self.view[2]), self.unit.name)
        return f"the weights '{name}',", "call engine.step(), load or write after the backward of every forward before it"

    def gathered(self) -> Tensor:
        """Gather the unit and return the view, or a copy where autograd records what backward does, for it may save that."""
        self.unit.gather_in_backward()
        view = self.unchanged().detach().as_strided(*self.view)
        if not torch.is_grad_enabled():
            return view
        copy = view.clone()
        if not in_backward():  # a script looks into the graph between passes
            self.unit.release()
        return copy


@dataclass(slots=True, kw_only=True, eq=False)
class SavedActivation(SavedTensor):
    """A tensor whose storage rests outside the compute device; `tensor` is the witness of writes to it."""

    resting: RestingView

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(self.resting.size)

    def unchanged(self) -> Tensor:
        super(SavedActivation, self).unchanged()
        return self.resting.restore()


class SavedTensorTracker:
    """Packs the tensors that autograd saves in the forward of the modules around `units`; `gather` gathers their weights."""

    def __init__(self, units: Mapping[nn.Module, Sequence[Unit]], gather: Callable[[nn.Module, Unit], None], *,
                 track_all: bool = False, activations: SavedActivations | None = None):
        """Weights that are released between their uses are tracked; all of them with `track_all`.

        Tensors that are not weights rest as `activations` says; None: on the device.
        """
        self._activations = activations
        self._resting_weights = {_storage(unit.full) for found in units.values() for unit in found}
        resharding = {module: [unit for unit in found if unit.reshards or track_all] for module, found in units.items()}
        self._weights = {_storage(unit.full): unit for found in resharding.values() for unit in found}
        _track(self._weights)
        for module, found in resharding.items():
            for unit in found:
                unit.set_backward_gather(partial(gather, module, unit))
        within = resharding if activations is None else units
        self._unit_of = {module: found[0] for module, found in within.items() if found}
        self._running: list[nn.Module] = []  # whose forward has begun, outermost first
        self._hooks: saved_tensors_hooks | None = None
        self._root: nn.Module | None = None

    def __bool__(self) -> bool:
        return bool(self._weights) or self._activations is not None

    def begin(self, root: nn.Module) -> None:
        """Set the hooks for a forward of `root`, if there is anything to track.

        A module that a script calls within `torch.utils.checkpoint` saves nothing: the checkpoint counts what is saved, and
        expects as much from the recompute, whose forward hooks gather within backward.
        """
        self.end()  # of a forward that was interrupted: torch may not have said so
        self._root = root
        self._running = list(self._unit_of)[:1]  # what runs in none of them counts as in the first
        if self._activations is not None:
            self._activations.begin_pass(root)
        if (self._weights or self._activations is not None) and not saved_by_checkpoint():
            self._hooks = saved_tensors_hooks(self._pack if self._activations is None else self._pack_to_rest, _unpack)
            self._hooks.__enter__()

    def see_output(self, output: object) -> None:
        """Note the output of the model, which is alive until its backward, unless a checkpoint of the script drops it."""
        if self._activations is not None and self._hooks is not None:
            self._activations.see_output(output)

    def end(self) -> None:
        """Remove the hooks, after those that an interrupt has left within them."""
        if self._root is not None:
            end_interrupted(self._root)
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()

    def enter(self, module: nn.Module) -> None:
        """Note that the forward of `module` begins."""
        if module in self._unit_of:
            self._running.append(module)

    def leave(self, module: nn.Module) -> None:
        """Note that the forward of `module` has ended, with those within it that an exception has ended."""
        if module in self._running[1:]:
            del self._running[self._running.index(module, 1):]

    def shares_weights(self, tensor: Tensor) -> bool:
        """Whether `tensor` shares the memory of weights that are released between uses."""
        return _storage(tensor) in self._weights

    @uncompiled
    def _pack(self, tensor: Tensor) -> SavedTensor:
        unit = self._unit_of[self._running[-1]]
        if _storage(tensor) in _units:
            return _pack_weight(unit, tensor)
        return SavedTensor(tensor=tensor.detach(), version=tensor._version, unit=unit)

    @opaque
    def _pack_to_rest(self, tensor: Tensor) -> SavedTensor:
        module = self._running[-1]
        if self._activations is not None and _storage(tensor) not in self._resting_weights:
            try:
                resting = self._activations.pack(tensor, module)
            except TierError as error:  # the store is full: the step fails, and weights and state are as before it
                raise TierError(f"{error}. It is a tensor of shape {tuple(tensor.shape)}, saved in the forward around unit "
                                f"'{self._unit_of[module].name}'") from error
            if resting is not None:
                return SavedActivation(tensor=version_witness(tensor), version=tensor._version, unit=self._unit_of[module],
                                       resting=resting)
        return self._pack(tensor)


@contextmanager
def tracked(units: Sequence[Unit]) -> Generator[None]:
    """Track what autograd saves within the context, in which `units` are gathered: backward gathers its weights again."""
    found = [unit for unit in units if unit.reshards]
    if not found:
        yield
        return
    _track({_storage(unit.full): unit for unit in found})  # also those that no engine drives
    with saved_tensors_hooks(partial(_pack_weight, found[0]), _unpack):
        yield


@opaque
def _pack_weight(unit: Unit, tensor: Tensor) -> SavedTensor:
    """Pack a tensor, perhaps of weights, that autograd saves in the forward around `unit`."""
    reference = _units.get(_storage(tensor))
    owner = None if reference is None else reference()
    if owner is None:
        return SavedTensor(tensor=tensor.detach(), version=tensor._version, unit=unit)
    base = tensor if tensor._base is None else tensor._base
    if (tensor.dtype, tensor.is_conj(), tensor.is_neg()) != (base.dtype, base.is_conj(), base.is_neg()):
        base = tensor  # its elements are read another way
    elif not isinstance(base, nn.Parameter):  # detached: kept, it would count as a user of the memory
        base = next((member.parameter for slot, member in zip(owner.layout.slots, owner.members, strict=True)
                     if slot.start <= tensor.storage_offset() < slot.stop and member.parameter.dtype == base.dtype), base)
    return SavedWeight(tensor=base, version=base._version, unit=owner,
                       view=(tensor.size(), tensor.stride(), int(tensor.storage_offset())))


@uncompiled
def _unpack(saved: SavedTensor) -> Tensor:
    if saved.__class__ is SavedTensor and saved.tensor._version == saved.version:
        return saved.tensor
    return _unpack_other(saved)


@opaque
def _unpack_other(saved: SavedTensor) -> Tensor:
    """Unpack what rests elsewhere, or was written to."""
    return saved.gathered() if isinstance(saved, SavedWeight) else saved.unchanged()


@uncompiled
def _storage(tensor: Tensor) -> int:
    """Return the identity of the storage, which stays the same while its memory is freed and allocated.

    0 for a sparse tensor and the like, which is no view of weights.
    """
    own = tensor.layout is torch.strided or tensor.is_nested
    return tensor.untyped_storage()._cdata if own else 0  # pyright: ignore[reportPrivateUsage]  no public name
