"""Forward hooks: gather units before each module's forward, release them after it, and track weights that autograd saves.

    outermost forward       a pass begins and ends: within it a released weight that is read is gathered
    forward of a module     gather its units before, release them after; of an embedding only the rows in use
    saved for backward      a weight is gathered when autograd unpacks it, on any path

The outermost forward is the model's, or that of a module within it that a script calls itself: `model.encoder(x)`.

Output hooks (backward_hooks.py) start gathers early; saved-tensor hooks guarantee that weights are gathered when
autograd reads them, also through closures or auxiliary losses, which no output shows. During recompute the same forward
hooks run inside a backward pass.
Modules that torch.compile has within one graph, whose weights stay in memory, are used where the model's forward begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code
from torch.utils.hooks import RemovableHandle

from shoal.activation import SavedActivations
from shoal.autograd import in_backward, in_gradient_transform
from shoal.errors import UsageError
from shoal.interrupts import unbroken
from shoal.module_hooks import is_scripted
from shoal.sparse.embeddings import lookup_indices
from shoal.zero.backward_hooks import BackwardHooks
from shoal.zero.compiled import RegionHook, opaque
from shoal.zero.reducer import BackwardPass, Reducer
from shoal.zero.replaced import ReplacedParameters
from shoal.zero.saved_tensors import SavedTensorTracker
from shoal.zero.unit import Unit
from shoal.zero.unit_state import Hold, Phase, Scope
from shoal.zero.window import Window

__all__ = ["Hooks"]


class Hooks:
    """Gathers and releases the units of one model in its forward and backward passes."""

    def __init__(self, model: nn.Module, units: Mapping[nn.Module, Sequence[Unit]], window: Window, reducer: Reducer,
                 scope: Scope, begin_pass: Callable[[bool], BackwardPass], before_forward: Callable[[], None], *,
                 track_all: bool = False, explicit_passes: bool = False, activations: SavedActivations | None = None):
        """With `track_all` saved tensors of all weights are tracked, not only of weights that are released between uses.

        Saved tensors that are not weights rest as `activations` says; None: on the device.
        """
        self._model = model
        self._units = units
        self._window = window
        self._scope = scope
        self._outermost: nn.Module | None = None
        self._records = False  # whether autograd records the pass
        self._names = {module: name for name, module in model.named_modules()}
        self._in_graphs: dict[nn.Module, None] = {}  # an ordered set: modules whose own hooks a compiled graph leaves out
        self._handles: list[RemovableHandle] = []
        self._saved = SavedTensorTracker(units, self._gather_saved, track_all=track_all, activations=activations)
        self._announce = before_forward
        self.replaced = ReplacedParameters(model, [unit for found in units.values() for unit in found])
        self.backward = BackwardHooks(model, units, window, reducer, scope, begin_pass, explicit_passes=explicit_passes)

    def __reduce__(self) -> tuple[Callable[[], Hooks], tuple[()]]:
        """Let a deep copy of the model, or a pickled one, have hooks without an engine that find nothing to do."""
        return _without_model, ()

    def install(self) -> None:
        """Attach to the model's modules and parameters."""
        for module in dict.fromkeys([self._model, *self._units]):
            before, after = self._before_forward, self._after_forward
            if module is not self._model and not any(unit.reshards for unit in self._units[module]):
                before, after = (RegionHook(hook, self._enter_graph, module) for hook in (before, after))
            self._handles += [module.register_forward_pre_hook(before, prepend=True), module.register_forward_hook(after)]
        for module in self._callable():
            before, after = self._begin_inner_call, self._end_inner_call
            if module in self._units or module is self._model:
                before, after = self._begin_call, self._end_call
            # On a block always_call would have torch.compile begin a graph of its own for each block
            always = module is self._model and bool(self._saved)
            self._handles += [module.register_forward_pre_hook(before, prepend=True),
                              module.register_forward_hook(after, always_call=always)]
        self.backward.install()

    def _callable(self) -> list[nn.Module]:
        """Return the modules whose forward may be an outermost pass: the model, and those whose weights are released."""
        released = {member.parameter for units in self._units.values() for unit in units if unit.reshards
                    for member in unit.members}
        return [module for module in self._names
                if module is self._model or not (is_scripted(module) or released.isdisjoint(module.parameters()))]

    def remove(self) -> None:
        """Remove all hooks, and every reference to the engine, so that it can be freed."""
        self._saved.end()
        while self._handles:
            self._handles.pop().remove()
        self.backward.remove()

    def run_ahead(self) -> None:
        """Start the first gathers of the next forward."""
        self.end_forward()
        self._window.prefetch_first(self._pass_name(self._model))

    def _enter_graph(self, module: nn.Module) -> None:
        """Use the units of `module`, which torch.compile traces within a graph, here and in every later forward's begin."""
        self._in_graphs[module] = None
        for unit in self._units[module]:
            self._window.use(unit)

    @opaque
    @unbroken
    def end_forward(self) -> None:
        """End a forward whose last hook did not run, after an interrupt or an error in a submodule that a script called."""
        if self._outermost is not None:
            self._finish(concluded=False)

    def shares_weights(self, tensor: Tensor) -> bool:
        """Whether the memory of `tensor` is that of weights which are released between their uses."""
        return self._saved.shares_weights(tensor)

    @opaque
    @unbroken
    def _begin_call(self, module: nn.Module, args: object) -> None:
        """Begin a forward pass, unless the call is within one or within backward."""
        if in_backward():
            return
        # The same module starts again, so the last forward was interrupted
        if self._outermost is None or module in (self._outermost, self._model):
            if self._saved and in_gradient_transform():
                raise UsageError(
                    f"torch.func.grad, vjp and jvp keep the weights of '{self._names.get(module) or type(module).__name__}' "
                    f"in a graph of their own, while the engine releases them after the forward. Differentiate a copy: "
                    f"`with shoal.gathered(model): plain = copy.deepcopy(model)`; or train at stage 0, 1 or 2")
            self._abandon()
            self._announce()
            self.backward.grads.hide()
            self.replaced.check(training=torch.is_grad_enabled())
            self._outermost, self._records = module, torch.is_grad_enabled()
            self._scope.open(self)
            self._window.begin(self._pass_name(module))
            for within in self._in_graphs:
                for unit in self._units[within]:
                    self._window.use(unit)
            self._saved.begin(self._model)

    @opaque
    @unbroken
    def _end_call(self, module: nn.Module, args: object, output: object) -> None:
        """End the forward pass with its outermost call, which may have raised."""
        if module is self._outermost and not in_backward():
            raised = output is None and sys.exc_info()[0] is not None
            if not raised:
                self._saved.see_output(output if module is self._model else None)
            self._finish(concluded=output is not None)

    def _begin_inner_call(self, module: nn.Module, args: object) -> None:
        """Call `_begin_call`, except in a graph, which runs within the forward of an outer module."""
        if not torch.compiler.is_compiling():
            self._begin_call(module, args)

    def _end_inner_call(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            self._end_call(module, args, output)

    def _finish(self, *, concluded: bool) -> None:
        """End the forward pass; units stay gathered for the backward of one that is `concluded`, but are not to be read."""
        keeps, self._outermost, self._records = concluded and self._records, None, False
        self._saved.end()
        self._scope.close(self)
        self._window.end()
        self.backward.grads.show()
        if keeps:
            self.backward.conceal_all()
        else:
            self.backward.release_all()

    def _pass_name(self, module: nn.Module) -> str:
        return "forward" if module is self._model else f"forward of {self._names.get(module)}"

    @opaque
    @unbroken
    def _before_forward(self, module: nn.Module, args: object) -> None:
        for unit in self._units.get(module, ()):
            unit.check_not_stepped()
            if self._records and not torch.is_grad_enabled():
                unit.expect_recompute()
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
        if in_backward():
            self.backward.hook_output(module, output)
            return
        if torch.is_grad_enabled():
            self.backward.hook_output(module, output)
        for unit in self._units.get(module, ()):
            self._after_use(unit)

    def _after_use(self, unit: Unit) -> None:
        """Release a unit after the forward of its module, unless its next use is near."""
        unit.end_hold(Hold.REUSE)
        if torch.is_grad_enabled():
            if self._window.reused(unit):
                unit.hold(Hold.REUSE)
            if self._window.stays_for_backward(unit):
                unit.keep_resident()
        unit.release()

    @unbroken
    def _gather_saved(self, module: nn.Module, unit: Unit) -> None:
        """Gather the unit within `module`, of whose weights autograd unpacks a saved tensor."""
        unit.check_not_stepped()
        if not in_backward():  # a script reads a node of the graph between passes
            unit.gather()
        elif unit.phase is Phase.GATHERED:
            unit.memory.use()
        else:
            self.backward.begin()
            self.backward.enter(module, unit)

    def _abandon(self) -> None:
        """Forget a pass that an exception ended."""
        if self.backward.abandon() or self._outermost is not None:
            self.backward.release_all()


def _without_model() -> Hooks:
    return Hooks(nn.Module(), {}, Window(0, 0), Reducer([], overlap=False), Scope(),
                 lambda _: BackwardPass(boundary=False, sync=False), lambda: None)


for _hook in (Hooks._begin_inner_call, Hooks._end_inner_call):  # pyright: ignore[reportPrivateUsage]  of this file
    skip_code(_hook.__code__)  # outside of a graph a hook is no graph of its own
