"""When a forward pass uses units: before and after each module's forward, and what autograd saves of weights.

    forward of a module     gather its units before, release them after; of an embedding the rows that it looks up may do
    saved for backward      a weight that autograd unpacks is gathered first, whatever led to it

Hooks on module outputs (backward_hooks.py) serve run-ahead, saved tensors serve truth: weights may be reached through
closures or auxiliary losses, which no output shows. During recompute the same forward hooks run inside a backward pass.
Modules that torch.compile has within one graph, whose weights stay in memory, are used where the model's forward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.interrupts import unbroken
from shoal.log import warn_once
from shoal.sparse.embeddings import lookup_indices
from shoal.zero.backward_hooks import BackwardHooks, graph_task
from shoal.zero.compiled import RegionHook, opaque
from shoal.zero.reducer import BackwardPass, Reducer
from shoal.zero.replaced import ReplacedParameters
from shoal.zero.saved_tensors import SavedTensorTracker
from shoal.zero.trainable_unit import TrainableUnit
from shoal.zero.unit import Unit
from shoal.zero.unit_state import Hold, Phase, Scope
from shoal.zero.window import Window

__all__ = ["Hooks"]


class Hooks:
    """The life of the units of one model, driven by its forward and backward passes."""

    def __init__(self, model: nn.Module, units: Mapping[nn.Module, Sequence[Unit]], window: Window, reducer: Reducer,
                 scope: Scope, begin_pass: Callable[[], BackwardPass], *, late: Sequence[Unit] = (), watched: bool = False,
                 announced: bool = False):
        """With `watched` saved tensors of all weights are tracked, not only of weights that are released between uses."""
        self._model = model
        self._units = units
        self._window = window
        self._scope = scope
        self._in_forward = False
        self._in_graphs: dict[nn.Module, None] = {}  # an ordered set: modules whose own hooks a compiled graph leaves out
        self._handles: list[RemovableHandle] = []
        self._saved = SavedTensorTracker({module: [unit for unit in found if unit.reshards or watched]
                                          for module, found in units.items()}, self._gather_saved)
        self.replaced = ReplacedParameters(model, [unit for found in units.values() for unit in found])
        self.backward = BackwardHooks(model, units, window, reducer, scope, begin_pass, late=late, announced=announced,
                                      refuses_create_graph=bool(self._saved))

    def __reduce__(self) -> tuple[Callable[[], Hooks], tuple[()]]:
        """Let a deep copy of the model, or a pickled one, have hooks without an engine that find nothing to do."""
        return _without_model, ()

    def install(self) -> None:
        """Attach to the model's modules and parameters."""
        if self._saved:
            self._handles.append(self._model.register_forward_hook(self.stop_saving, always_call=True))
        for module in dict.fromkeys([self._model, *self._units]):
            before, after = self._before_forward, self._after_forward
            if module is not self._model and not any(unit.reshards for unit in self._units[module]):
                before, after = (RegionHook(hook, self._enter_graph, module) for hook in (before, after))
            self._handles += [module.register_forward_pre_hook(before, prepend=True), module.register_forward_hook(after)]
        self.backward.install()

    def remove(self) -> None:
        """Detach from everything, the engine included: it goes with its last reference."""
        self._saved.end()
        while self._handles:
            self._handles.pop().remove()
        self.backward.remove()

    def run_ahead(self) -> None:
        """Start the first gathers of the next forward."""
        self._window.open("forward")

    def _enter_graph(self, module: nn.Module) -> None:
        """Use the units of `module`, which torch.compile traces within a graph, here and in every later forward's begin."""
        self._in_graphs[module] = None
        for unit in self._units[module]:
            self._window.use(unit)

    @opaque
    @unbroken
    def stop_saving(self, *hooked: object) -> None:
        """Track no more saved tensors: the forward is over. Torch calls no hook after an interrupt."""
        if not _recomputing():
            self._saved.end()

    def shares_weights(self, tensor: Tensor) -> bool:
        """Whether the memory of `tensor` is that of weights which are released between their uses."""
        return self._saved.shares_weights(tensor)

    @opaque
    @unbroken
    def _before_forward(self, module: nn.Module, args: object) -> None:
        for unit in self._units.get(module, ()):
            unit.check()
            if self._saved.begun and not torch.is_grad_enabled() and isinstance(unit, TrainableUnit):
                unit.gradient.expect_recompute()  # a re-entrant pass will run this once more, and give it gradients
        if module is self._model and not _recomputing():
            self._abandon()
            self.backward.grads.hide()
            self.replaced.check(training=torch.is_grad_enabled())
            self._in_forward = True
            self._scope.open()
            self._window.begin("forward")
            for within in self._in_graphs:
                for unit in self._units[within]:
                    self._window.use(unit)
            if torch.is_grad_enabled():
                self._saved.begin()
        self._saved.enter(module)
        for unit in self._units.get(module, ()):
            if unit.gathers_rows and (rows := lookup_indices(module, args)) is not None:
                unit.gather_rows(rows)
            else:
                self._window.use(unit)

    @opaque
    @unbroken
    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        self._saved.leave(module)
        for unit in self._units.get(module, ()):
            if unit.phase is Phase.ROWS_GATHERED:
                unit.release()
        if _recomputing():
            self.backward.watch(module, output)
            return
        watched = self.backward.watch(module, output) if torch.is_grad_enabled() else True
        for unit in self._units.get(module, ()):
            self._after_use(unit, watched=watched)
        if module is self._model:
            self._in_forward = False
            self._scope.close()
            self._window.end()
            self.backward.grads.show()
            if not torch.is_grad_enabled():
                self.backward.release_all()

    def _after_use(self, unit: Unit, *, watched: bool) -> None:
        """Release a unit after the forward of its module, unless its next use is near."""
        if not watched and isinstance(unit, TrainableUnit) and any(m.parameter.requires_grad for m in unit.members):
            unit.hold(Hold.FOREIGN_READ)
            warn_once(f"no tensor with a gradient was found in the output of the module around unit '{unit.name}'; it "
                      f"stays gathered until the backward pass ends. Return tensors, or containers of tensors.")
        unit.drop(Hold.REUSE)
        if torch.is_grad_enabled():
            if self._window.reused(unit):
                unit.hold(Hold.REUSE)
            if self._window.stays_for_backward(unit):
                unit.keep_resident()
        unit.release()

    @unbroken
    def _gather_saved(self, module: nn.Module, unit: Unit) -> None:
        """Gather the unit within `module`, of whose weights autograd unpacks a saved tensor."""
        unit.check()
        if unit.phase is not Phase.GATHERED:
            if _recomputing():
                self.backward.begin()
                self.backward.enter(module, unit)
            else:  # a script looks into the graph between passes
                unit.gather()

    def _abandon(self) -> None:
        """Forget a pass that an exception ended."""
        if self.backward.abandon() or self._in_forward:
            self._in_forward = False
            self.backward.release_all()


def _recomputing() -> bool:
    return graph_task() != -1


def _without_model() -> Hooks:
    return Hooks(nn.Module(), {}, Window(0, 0), Reducer([], overlap=False), Scope(),
                 lambda: BackwardPass(boundary=False, sync=False))
