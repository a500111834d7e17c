"""Backward hooks: gather units before backward uses them, and reduce them when their gradients are complete.

    gradient of a module's output    gather the module's units: its backward begins
    gradient of a slot               collect it; reduce and release a complete unit
    backward moves to other modules  units of earlier ones get no more gradients: reduce and release them
    end of backward                  reduce what is incomplete, release everything

Autograd runs the nodes of one forward strictly in reverse order. So a unit that no last gradient completes, frozen or with
an unused parameter, is done when the backward of a module outside its own begins and the graph holds no more gradients for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.autograd import at_end_of_backward, backward_liveness, graph_task, in_gradient_transform, is_reached, weak_hook
from shoal.interrupts import unbroken
from shoal.tree import tensors_within
from shoal.zero.compiled import opaque
from shoal.zero.guard import gradient_edge, hooks_of_gradient
from shoal.zero.readable_grads import ReadableGrads
from shoal.zero.reducer import BackwardPass, Reducer, collect
from shoal.zero.trainable_unit import TrainableUnit
from shoal.zero.unit import Unit
from shoal.zero.unit_state import Hold, Scope
from shoal.zero.window import Window

__all__ = ["BackwardHooks"]

_DETACHED = BackwardPass(boundary=False, sync=False)


class BackwardHooks:
    """The backward passes through the units of one model."""

    def __init__(self, model: nn.Module, units: Mapping[nn.Module, Sequence[Unit]], window: Window, reducer: Reducer,
                 scope: Scope, begin_pass: Callable[[bool], BackwardPass], *, explicit_passes: bool):
        """`begin_pass` is called when a pass begins, before anything is collected: with whether the pass before has failed.

        With `explicit_passes` each pass is a call of `run_as_pass`, and the model's output needs no hook.
        """
        self._model = model
        self._units = units
        self._window = window
        self.reducer = reducer
        self._scope = scope
        self._begin_pass = begin_pass
        # The gradient of the model's output tells that a pass begins, and that the first weights are needed again
        self._hooks_output = not explicit_passes or any(unit.reshards for found in units.values() for unit in found)
        self._inner = {module: frozenset(module.modules()) for module in units}
        self._pass: BackwardPass | None = None
        self._is_running = _never  # autograd drops a pass that fails, and tells no hook
        self._failed = False  # a pass that gave parameters gradients has failed, and none has begun since
        self._passes = 0
        self._task = -1  # autograd's number of the present pass; a re-entrant pass within it has its own
        self._entered: list[tuple[nn.Module, Unit]] = []  # gathered by the present pass, waiting for it to move on
        self._handles: list[RemovableHandle] = []
        # By the id of a parameter: all its hooks, and the key of the engine's
        self._collect_hooks: dict[int, tuple[dict[int, object], int]] = {}
        # Gradients that hooks of scripts have not seen yet
        self._collect_later: list[tuple[TrainableUnit, int, nn.Parameter]] = []
        self._within_forward = False
        self._collected = False  # the present pass gave parameters gradients, as `autograd.grad` does not
        self.grads = ReadableGrads([unit for found in units.values() for unit in found])
        self._shows_grads = not explicit_passes

    def install(self) -> None:
        """Attach to the parameters."""
        found = [unit for units in self._units.values() for unit in units]
        training = any(isinstance(unit, TrainableUnit) for unit in found)
        for unit in found:
            for slot, member in enumerate(unit.members if training else ()):
                if member.parameter.requires_grad:  # of a frozen unit: in no group of the optimizer, and never stepped
                    take = _drop
                    if isinstance(unit, TrainableUnit):
                        take = (weak_hook(partial(_collect_spanning, slot=slot), unit) if unit.replica_group.spans_stages
                                else weak_hook(partial(BackwardHooks._collect, slot=slot), self, unit))
                    self._handles.append(handle := member.parameter.register_post_accumulate_grad_hook(take))
                    self._collect_hooks[id(member.parameter)] = hooks_of_gradient(member.parameter), handle.id

    def remove(self) -> None:
        """Remove all hooks, and every reference to the engine, so that it can be freed."""
        self.grads.close(keep=False)
        while self._handles:
            self._handles.pop().remove()
        self._collect_hooks.clear()
        self._begin_pass = _detached

    def run_as_pass(self, run: Callable[[], None]) -> None:
        """Call `run` as one backward pass; if nothing runs in it, reduce all the same, as the other ranks do."""
        passes = self._passes
        run()
        if self._passes == passes:
            self.reducer.begin(self._begin_pass(False))
            self.reducer.finish()

    def interrupt(self) -> None:
        """Note that an exception has ended the present pass, whose end autograd will not announce."""
        self._failed |= self._pass is not None and self._collected
        self._pass = None
        self._scope.close(self)
        self.reducer.interrupt()

    def abandon(self) -> bool:
        """Forget a pass that an exception ended; return whether there was one."""
        abandoned = self._pass is not None or bool(self._entered)
        if self._pass is not None:
            self.interrupt()
        self._entered, self._collect_later = [], []
        return abandoned

    @property
    def has_failed(self) -> bool:
        """Whether the last pass has failed after it had given parameters gradients."""
        return self._failed or (self._pass is not None and self._collected and not self._is_running())

    def hook_output(self, module: nn.Module, output: object) -> None:
        """Register a hook on the output that gathers the units of `module` when its gradient arrives."""
        if module not in self._units if module is not self._model else not self._hooks_output:
            return
        if in_gradient_transform():  # the weights, or copies of them, are arguments, and no backward will collect
            return
        for tensor in tensors_within(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._before_module, module))

    def begin(self) -> None:
        """Begin a pass, unless one is under way."""
        if self._pass is not None:
            if self._is_running():
                return
            self.abandon()
        self._pass = _DETACHED  # set first: if a check below raises, `interrupt` must find a pass
        self._is_running = backward_liveness()
        # The forward itself calls autograd.grad, e.g. for forces in molecular dynamics
        self._within_forward, self._collected = self._scope.is_open, False
        self._scope.open(self)
        self._passes += 1
        self._task = graph_task()
        at_end_of_backward(self._end)
        self.grads.close(keep=True)
        self._collect_last()
        self._pass = self._begin_pass(self._failed)
        self._failed = False
        if not self._within_forward:
            self._window.begin("backward")
        self.reducer.begin(self._pass)

    def _collect_last(self) -> None:
        """Move the engine's hook behind hooks that scripts have registered since, so that theirs run first."""
        for hooks, key in self._collect_hooks.values():
            if len(hooks) > 1:
                hooks[key] = hooks.pop(key)

    def _is_collected_last(self, parameter: nn.Parameter) -> bool:
        hooks, key = self._collect_hooks[id(parameter)]
        return next(reversed(hooks)) == key

    def enter(self, module: nn.Module, unit: Unit) -> None:
        """Gather a unit for the backward of `module`."""
        self._window.use(unit)
        if (module, unit) not in self._entered:
            self._entered.append((module, unit))

    @opaque
    @unbroken
    def _before_module(self, module: nn.Module, gradient: Tensor) -> None:
        self.begin()
        self._conclude_units_before(module)
        for unit in self._units.get(module, ()):
            if not unit.gathers_rows:  # a look-up's gradient needs no weights; where it does, the saved tensor gathers them
                self.enter(module, unit)

    def _conclude_units_before(self, module: nn.Module) -> None:
        """Conclude units whose module has ended its backward, now that the backward of `module` begins."""
        waiting, self._entered = self._entered, []
        for around, unit in waiting:
            if module in self._inner[around] or self._receives_more(unit):
                self._entered.append((around, unit))
                continue
            unit.conclude_grads()
            self._done(unit)
        self.reducer.launch_ready()

    @opaque
    @unbroken
    def _collect(self, unit: TrainableUnit, parameter: nn.Parameter, *, slot: int) -> None:
        if self._pass is None:  # a loss of weights alone: this hook begins the pass, too late to be put behind the others
            seen = self._is_collected_last(parameter)
            self.begin()
            if not seen:
                self._collect_later.append((unit, slot, parameter))
                return
        unit.check_not_stepped()
        self._collected = True
        if collect(unit, slot, parameter, nested=graph_task() != self._task):
            self._done(unit)
            self.reducer.completed(unit.gradient)

    def _receives_more(self, unit: Unit) -> bool:
        """Whether the present pass will still give `unit` a gradient: autograd knows what its graph leads to."""
        parameters = [unit.members[slot].parameter for slot in unit.slots_without_grad]
        if not parameters:
            return False
        if graph_task() != self._task:  # the graph of a re-entrant pass is not the whole
            return True
        return any(is_reached(gradient_edge(parameter).node)
                   for parameter in parameters if parameter.requires_grad)  # it may be frozen by now

    def _done(self, unit: Unit) -> None:
        """Release a unit that this pass needs no more; weights that the step or the next forward uses soon stay resident."""
        if unit.is_released:
            return
        overwritten = self._pass is not None and self._pass.boundary and unit.has_separate_master
        if self._window.begins_with("forward", unit) and not overwritten:
            unit.keep_resident()
        else:
            unit.keep_for_step()
        unit.release()

    @opaque
    @unbroken
    def _end(self) -> None:
        left, self._collect_later = self._collect_later, []
        for unit, slot, parameter in left:
            self._collect(unit, parameter, slot=slot)
        self.reducer.finish()
        if not self._within_forward:
            self._window.end()
        for _, unit in self._entered:
            self._done(unit)
        self._entered = []
        if self._shows_grads and self._pass is not None:
            self.grads.open(self._pass.grad_refusal, shown=self._collected or not self._within_forward)
        self._pass = None
        self._scope.close(self)
        if not self._scope.is_open:
            self.release_all()

    def release_all(self) -> None:
        """Release every unit that no context holds: a pass is over."""
        for units in self._units.values():
            for unit in units:
                unit.end_hold(Hold.FOREIGN_READ | Hold.REUSE)
                unit.release()

    def conceal_all(self) -> None:
        """Release every unit but those that wait for the backward pass, which are not to be read before it."""
        for units in self._units.values():
            for unit in units:
                unit.end_hold(Hold.FOREIGN_READ)
                unit.release()
                unit.conceal()


@opaque
@unbroken
def _collect_spanning(unit: TrainableUnit, parameter: nn.Parameter, *, slot: int) -> None:
    """Collect a gradient of a unit that spans pipeline stages: no pass of one stage completes it."""
    collect(unit, slot, parameter)


@opaque
def _drop(parameter: nn.Parameter) -> None:
    """Forget the gradient of a parameter that is never stepped."""
    parameter.grad = None


def _detached(after_failure: bool) -> BackwardPass:
    return _DETACHED


def _never() -> bool:
    return False
