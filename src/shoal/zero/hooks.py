"""When units are used: before and after each module's forward and backward, and when a backward pass ends.

    forward of a module     gather its units before, release them after; of an embedding the rows that it looks up may do
    backward of a module    gather them when the gradient of one of its outputs arrives
    saved for backward      a weight that autograd unpacks is gathered first, whatever led to it
    gradient of a slot      collect it; a complete unit is reduced and released
    leaving a module        its units are done, with what they received: reduce and release them
    end of backward         reduce what is incomplete, release everything

The second line is for run-ahead, the third for truth: weights may be reached through closures or auxiliary
losses, which no output shows. Autograd runs the nodes of one forward strictly in reverse order, so that a
unit that no last gradient completes, frozen or with an unused parameter, is done when the backward of a module outside
its own begins and the graph holds no more gradients for it. During recompute the same forward hooks run inside backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from shoal.errors import UsageError
from shoal.interrupts import unbroken
from shoal.log import warn_once
from shoal.sparse.embeddings import lookup_indices
from shoal.tree import tensors_within
from shoal.zero.collected import collect, collect_late, drop
from shoal.zero.reducer import Reducer
from shoal.zero.saved_tensors import SavedTensorTracker
from shoal.zero.unit import Phase, Scope, Unit
from shoal.zero.window import Window


class Hooks:
    """The life of the units of one model, driven by its forward and backward passes."""

    def __init__(self, model: nn.Module, units: Mapping[nn.Module, Sequence[Unit]], window: Window, reducer: Reducer,
                 scope: Scope, *, boundary: Callable[[], bool], sync: Callable[[], bool], every: Sequence[Unit] = (),
                 late: Sequence[Unit] = (), watched: bool = False, announced: bool = False):
        self._model = model
        self._units = units
        self._window = window
        self.reducer = reducer
        self._every = every
        self._late = frozenset(late)
        self._scope = scope
        self._boundary = boundary
        self._sync = sync
        self._in_forward = False
        self._in_backward = False
        self._entered: list[tuple[nn.Module, Unit]] = []  # gathered by the present backward, waiting for it to move on
        # What the gradient of the model's output tells: a pass begins, and the first weights are needed again
        self._noticed = not announced or any(unit.travels for found in units.values() for unit in found)
        self._inner = {module: frozenset(module.modules()) for module in units}
        self._begun = 0  # passes
        self._task = -1  # autograd's number of the present backward pass; a re-entrant one within it has its own
        self._handles: list[RemovableHandle] = []
        self._saving = SavedTensorTracker({module: [unit for unit in found if unit.travels or watched]
                               for module, found in units.items()}, self._bring)
        self.before_backward: Callable[[], None] = lambda: None
        """Called when a backward pass begins, before anything is collected."""

    def __reduce__(self) -> tuple[Callable[[], Hooks], tuple[()]]:
        """Let a deep copy of the model, or a pickled one, have hooks that find nothing to do: it belongs to no engine."""
        return _without_model, ()

    def install(self) -> None:
        """Attach to the model's modules and parameters."""
        if self._saving:
            self._handles.append(self._model.register_forward_hook(self.stop_saving, always_call=True))
        for module in dict.fromkeys([self._model, *self._units]):
            self._handles += [
                module.register_forward_pre_hook(self._before_forward, prepend=True),
                module.register_forward_hook(self._after_forward),
            ]
        training = any(unit.trainable for units in self._units.values() for unit in units)
        for units in self._units.values():
            for unit in units:
                for slot, member in enumerate(unit.members if training else ()):
                    if member.parameter.requires_grad:  # of a frozen unit: in no group of the optimizer, and never stepped
                        take = partial(self._collecting(unit), unit, slot) if unit.trainable else drop
                        self._handles.append(member.parameter.register_post_accumulate_grad_hook(take))

    def open(self) -> None:
        """Start what the next forward uses first."""
        self._let_go_of_the_rest("forward")
        self._window.open("forward")

    def as_pass(self, run: Callable[[], None]) -> None:
        """Call `run` as one backward pass, even if nothing runs in it: what the others reduce, this rank does too."""
        begun = self._begun
        run()
        if self._begun == begun:
            self.before_backward()
            self.reducer.begin(boundary=self._boundary(), sync=self._sync())
            self.reducer.finish()

    def remove(self) -> None:
        """Detach from everything, the engine included: it goes with its last reference."""
        self._saving.end()
        while self._handles:
            self._handles.pop().remove()
        self._boundary = self._sync = bool
        self.before_backward = lambda: None

    def interrupt(self) -> None:
        """Take note that an exception has ended the present backward pass, whose end autograd will not announce."""
        self._in_backward = self._scope.open = False

    @unbroken
    def _before_forward(self, module: nn.Module, args: object) -> None:
        for unit in self._units.get(module, ()):
            unit.check()
            if self._saving.begun and not torch.is_grad_enabled() and unit.gradient is not None:
                unit.gradient.again = True  # a re-entrant pass will run this once more, and give it gradients
        if module is self._model and not self._recomputing():
            self._abandon()
            self._in_forward = self._scope.open = True
            self._window.begin("forward")
            self._let_go_of_the_rest("forward")
            if torch.is_grad_enabled():
                self._saving.begin()
        self._saving.enter(module)
        for unit in self._units.get(module, ()):
            if unit.looks_up and (numbers := lookup_indices(module, args)) is not None:
                unit.look_up(numbers)
            else:
                self._window.use(unit)

    @unbroken
    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        self._saving.leave(module)
        for unit in self._units.get(module, ()):
            if unit.phase is Phase.LOOKED_UP:
                unit.release()
        if self._recomputing():
            self._watch(module, output)
            return
        watched = self._watch(module, output) if torch.is_grad_enabled() else True
        for unit in self._units.get(module, ()):
            if not watched and unit.trainable and any(member.parameter.requires_grad for member in unit.members):
                unit.held = True
                warn_once(f"no tensor with a gradient was found in the output of the module around unit '{unit.name}'; it "
                          f"stays gathered until the backward pass ends. Return tensors, or containers of tensors.")
            unit.awaited = torch.is_grad_enabled() and self._window.reused(unit)
            if torch.is_grad_enabled() and self._window.stays_for_backward(unit):
                unit.keep()
            unit.release()
        if module is self._model:
            self._in_forward = self._scope.open = False
            self._window.end()
            if not torch.is_grad_enabled():
                self._release_all()

    @unbroken
    def stop_saving(self, *hooked: object) -> None:
        """Look no more at what autograd saves: the forward is over. Torch calls no hook after an interrupt."""
        if not self._recomputing():
            self._saving.end()

    def lends(self, tensor: Tensor) -> bool:
        """Whether the memory of `tensor` is that of weights, which is given up between their uses."""
        return self._saving.lends(tensor)

    @unbroken
    def _bring(self, module: nn.Module, unit: Unit) -> None:
        """Have the weights of the unit within `module` for whoever reads them in backward."""
        unit.check()
        if unit.phase is not Phase.GATHERED:
            if self._recomputing():
                self._begin_backward()
                self._enter(module, unit)
            else:  # somebody looks into the graph between passes
                unit.gather()

    def _watch(self, module: nn.Module, output: object) -> bool:
        """Have `_before_backward` called when the gradient of an output arrives; say whether there is one."""
        if module not in self._units if module is not self._model else not self._noticed:
            return True
        watched = [tensor for tensor in tensors_within(output) if tensor.requires_grad and not tensor.is_leaf]
        for tensor in watched:
            tensor.register_hook(partial(self._before_backward, module))
        return bool(watched)

    @unbroken
    def _before_backward(self, module: nn.Module, gradient: Tensor) -> None:
        self._begin_backward()
        self._leave(module)
        for unit in self._units.get(module, ()):
            if not unit.looks_up:  # the gradient of a look-up does not need the weights; if it does, `_unpack` knows
                self._enter(module, unit)

    def _enter(self, module: nn.Module, unit: Unit) -> None:
        self._window.use(unit)
        if (module, unit) not in self._entered:
            self._entered.append((module, unit))

    def _leave(self, module: nn.Module) -> None:
        """Be done with the units whose module's backward is over, now that `module`'s begins."""
        waiting, self._entered = self._entered, []
        for around, unit in waiting:
            if module in self._inner[around] or self._receives_more(unit):
                self._entered.append((around, unit))
                continue
            if unit.gradient is not None:
                unit.gradient.addend.conclude()
            self._done(unit)
        self.reducer.advance()

    def _done(self, unit: Unit) -> None:
        """Release a unit that this pass needs no more; of its weights the step or the next forward may begin with some."""
        if not unit.is_released:
            overwritten = self._boundary() and unit.state is not None and not unit.is_stepped_in_place
            begins = self._window.begins("forward", unit) and not overwritten
            waits = unit.gradient is not None and unit.gradient.stays and unit.is_stepped_in_place and unit.can_stay
            if begins or waits:
                unit.keep(None if begins else range(len(unit.master_span)))
            unit.release()

    def _receives_more(self, unit: Unit) -> bool:
        """Whether the present pass will still give `unit` a gradient: autograd knows what its graph leads to."""
        addend = None if unit.gradient is None else unit.gradient.addend
        if addend is None or addend.complete:
            return False
        if _task() != self._task:  # the graph of a re-entrant pass is not the whole
            return True
        return any(torch._C._will_engine_execute_node(get_gradient_edge(unit.members[slot].parameter).node)  # pyright: ignore
                   for slot in addend.missing if unit.members[slot].parameter.requires_grad)  # it may be frozen by now

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        if self._saving and torch.is_grad_enabled():  # what this pass saves would be released before its own backward
            raise UsageError("backward with create_graph=True through a model at stage 3 is not supported, nor through one "
                             "whose weights rest in another tier or are stepped in backward: a second derivative needs the "
                             "weights of the first pass; use zero_optimization.stage 0, 1 or 2 without offload_param and "
                             "step_in_backward")
        self._in_backward = self._scope.open = True
        self._begun += 1
        self._task = _task()
        Variable._execution_engine.queue_callback(self._end_backward)  # pyright: ignore  no annotation, no other way
        self.before_backward()
        self._window.begin("backward")
        self._let_go_of_the_rest("backward")
        self.reducer.begin(boundary=self._boundary(), sync=self._sync())

    def _collecting(self, unit: Unit) -> Callable[[Unit, int, nn.Parameter], None]:
        """Return what takes a gradient of `unit`; of one that several stages hold it is no matter of this pass."""
        return collect_late if unit in self._late else self._collect

    @unbroken
    def _collect(self, unit: Unit, slot: int, parameter: nn.Parameter) -> None:
        self._begin_backward()
        unit.check()
        if collect(unit, slot, parameter, again=_task() != self._task):
            assert unit.gradient is not None
            self._done(unit)
            self.reducer.completed(unit.gradient)
            self.reducer.advance()

    @unbroken
    def _end_backward(self) -> None:
        self.reducer.finish()
        self._window.end()
        for _, unit in self._entered:
            self._done(unit)
        self._release_all()
        self._in_backward = self._scope.open = False

    def _let_go_of_the_rest(self, name: str) -> None:
        """Of what passes have kept, of all roots, keep what the pass `name` of this one begins with: the room is one."""
        for unit in self._every:
            if unit.stay and unit.owed is None and not self._window.begins(name, unit):
                unit.stay.unpin()

    def _release_all(self) -> None:
        self._entered = []
        for units in self._units.values():
            for unit in units:
                unit.held = unit.awaited = False
                unit.release()

    def _recomputing(self) -> bool:
        return _task() != -1

    def _abandon(self) -> None:
        """Forget a pass that an exception ended."""
        if self._in_forward or self._in_backward or self._entered:
            self._in_forward = self._in_backward = False
            self._release_all()


def _task() -> int:
    """Return autograd's number of the backward pass under way on this thread, -1 for none."""
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]  no public question


def _without_model() -> Hooks:
    return Hooks(nn.Module(), {}, Window(0, 0), Reducer([], overlap=False), Scope(), boundary=bool, sync=bool)
