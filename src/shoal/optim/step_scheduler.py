"""The step of all units as a pipeline of chunks: fetches and commits of offloaded state overlap with stepping.

    fetch    | 1 | 2 | 3 | 4 |
    step         | 1 | 2 | 3 | 4 |
    commit           | 1 | 2 | 3 | 4 |
    publish                  unit a          unit b

A chunk is what the optimizer steps in one call: resident views are grouped up to a number of elements; a view with offloaded
state is a chunk of its own. A unit is published as soon as its last chunk is stepped, in the same order on every rank. A
step that needs a value of all chunks before it changes weights makes two passes: `run_measuring_pass`, then `run`.

*Deferred steps.* The weights of a released unit cannot be read before it is gathered. If its state is offloaded too, its
step is deferred: a thread takes it while the next forward computes, and gathering the unit waits for it.

*Steps in backward.* If nothing about a step is decided after backward, `step_in_backward` gives the thread a unit as soon as
its gradient is reduced, so the gradient is never offloaded. `run` then completes the step, and publishes in the one order.
Where a device has the gradient, the thread waits for its copy to the host. The device has then passed every reader of the
old weights, so the new ones go up at once; the compute stream waits for them when the unit is published.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shoal.device import set_current, stream_of_thread, within
from shoal.errors import TierError
from shoal.optim.step_pass import StepPass
from shoal.optim.views import MasterView
from shoal.tier import JoinedTransfers, Lanes, Transfer
from shoal.tier.span import DONE
from shoal.tier.streams import h2d_stream
from shoal.zero.optimizer_state import OptimizerState
from shoal.zero.trainable_unit import TrainableUnit

__all__ = ["DeferredStep", "FailedStep", "MomentPrefetcher", "StepScheduler", "began_in_backward"]


@dataclass(slots=True, kw_only=True)
class _StepChunk:
    """Views that are stepped together, and the units that are complete afterwards."""

    step_pass: StepPass
    views: list[MasterView] = field(default_factory=list[MasterView])
    units: list[TrainableUnit] = field(default_factory=list[TrainableUnit])
    transfer: Transfer = DONE

    @property
    def name(self) -> str:
        return self.views[0].unit.name if self.views else "nothing"

    @property
    def is_offloaded(self) -> bool:
        return any(_is_offloaded(view.unit) for view in self.views)


_Source = Callable[[int], _StepChunk | None]
"""Returns the next chunk, or None; the argument is the number of fetched chunks that are not stepped yet."""


class DeferredStep:
    """The step of one unit in the scheduler's thread, or one that backward began (a `PendingStep` of the unit)."""

    def __init__(self, scheduler: StepScheduler, unit: TrainableUnit, *, in_backward: bool = False):
        self._scheduler, self._unit = scheduler, unit
        self._in_backward = in_backward
        self._is_taken = False
        self.keeps_weights = False
        """Whether the step leaves the weights in memory: the next pass needs the unit."""

    @property
    def is_taken(self) -> bool:
        return self._is_taken

    @property
    def in_backward(self) -> bool:
        return self._in_backward

    def request(self) -> None:
        if not (self._in_backward or self._is_taken):
            self._scheduler.finish_deferred(self._unit, wait=False)  # the thread may have taken it without notice
        self.keeps_weights = not self._is_taken

    def finish(self) -> None:
        if not self._is_taken:
            self._scheduler.finish_deferred(self._unit)

    def mark_taken(self) -> None:
        """Note that the weights contain the step."""
        self._is_taken = True

    def leave_backward(self) -> None:
        """Note that `engine.step()` has begun: from now on the weights may be requested."""
        self._in_backward = False


class FailedStep:
    """A step that failed halfway (a `PendingStep` of every unit): `check` raises its error."""

    is_taken = False
    in_backward = False

    def __init__(self, check: Callable[[], None]):
        self._check = check

    def request(self) -> None:
        pass

    def finish(self) -> None:
        self._check()


class StepScheduler:
    """Steps `units` chunk by chunk. `fetches_ahead` and `commits_behind` count chunks.

    Units that wait for their step in backward hold at most `max_waiting_bytes` together, unless one alone has more.
    """

    def __init__(self, units: Sequence[TrainableUnit], *, chunk_elements: int, fetches_ahead: int, commits_behind: int,
                 max_waiting_bytes: int, lanes: Lanes, device: torch.device):
        self._units = units
        self._device = device
        self._chunk_elements = chunk_elements
        self._fetches_ahead = fetches_ahead
        self._commits_behind = commits_behind
        self._max_waiting_bytes = max_waiting_bytes
        self._lanes = lanes
        self._commits: deque[Transfer] = deque()  # the last ones may run into the next forward
        self._deferred: deque[TrainableUnit] = deque()
        self._num_stepped = 0  # of these, by the thread
        self._queue: deque[_StepChunk] = deque()  # their chunks, for the thread
        self._waiting_bytes: dict[TrainableUnit, int] = {}
        self._prefetcher = MomentPrefetcher()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._thread_stream: torch.Stream | None = None
        self._idle = True  # the thread has ended, or will end without taking another chunk
        self._owner = os.getpid()
        self._lock = threading.RLock()  # taken directly: Ctrl-C within Condition.__enter__ could leave it locked
        self._changed = threading.Condition(self._lock)

    def run_measuring_pass(self, slots_with_grad: Mapping[TrainableUnit, int], views: Sequence[MasterView],
                           step_pass: StepPass, reduce_sums: Callable[[], None]) -> None:
        """Run the measuring `step_pass` over the `views` that `run` will step, then `reduce_sums` over the ranks.

        The pass reads the gradients and changes moments, but no weights.
        """
        self.finish_deferred()
        self._join()
        try:
            chunks = self._chunks([unit for unit, mask in slots_with_grad.items() if mask], views, step_pass)
            deque(self._stream(_source_of(chunks)), maxlen=0)
            reduce_sums()
        except BaseException as error:
            self.fail(error)
            raise

    def run(self, slots_with_grad: Mapping[TrainableUnit, int], views: Sequence[MasterView], step_pass: StepPass, *,
            defer: bool) -> None:
        """Step `views`, and publish the units of `slots_with_grad` that received a gradient on any rank.

        With `defer`, the steps of units are deferred where possible. Units that backward has stepped are only published.
        """
        units = [unit for unit, mask in slots_with_grad.items() if mask]
        begun = {unit for unit in units if began_in_backward(unit)}
        if begun:
            self.check()
        else:
            self.finish_deferred()
        later = [unit for unit in units if defer and unit not in begun and _can_defer(unit)]
        now = [unit for unit in units if unit not in begun and unit not in later]
        if now or not begun:
            self._join()
        h2d_stream(self._device).follow_compute()  # scripts may have read weights since backward
        try:
            for unit in self._stream(_source_of(self._chunks(now, views, step_pass))):
                if not begun:
                    _publish(unit)
            for unit in units if begun else ():  # in one order on all ranks, whichever units backward stepped
                if unit in begun:
                    self._end_backward_step(unit)
                elif unit in now:
                    _publish(unit)
        except BaseException as error:
            self.fail(error)
            raise
        self._defer(later, self._chunks(later, views, step_pass))

    @torch.no_grad()
    def step_in_backward(self, unit: TrainableUnit, views: Sequence[MasterView], step_pass: StepPass, *,
                         deferred: bool) -> None:
        """Step `views`, all views of `unit`, while backward continues: in the thread if `deferred`, else at once."""
        self.check()
        step = DeferredStep(self, unit, in_backward=True)
        unit.begin_step(step)
        chunks = self._chunks([unit], views, step_pass)
        if deferred:
            self._wait_for_memory(unit)
            self._defer([unit], chunks)
        else:
            self._join()
            deque(self._stream(_source_of(chunks)), maxlen=0)
            step.mark_taken()

    def prefetch(self, views: Iterable[MasterView]) -> None:
        """Prefetch the moments of `views` in their order, before their units are stepped; an empty argument ends it."""
        self._prefetcher.schedule(view for view in views if _is_offloaded(view.unit))
        self._prefetcher.start(self._fetches_ahead + 1)

    def fail(self, error: BaseException) -> None:
        """Note that a step failed halfway, and make every read of weights raise."""
        self._failure = self._failure or error
        self._deferred.clear()  # further steps of the thread do not count
        for unit in self._units:
            unit.invalidate(FailedStep(self.check))

    def finish_deferred(self, unit: TrainableUnit | None = None, *, wait: bool = True) -> None:
        """Wait for the deferred step of `unit`, or of all units. Raises `TierError` now and later if a step failed.

        Without `wait`, only publish the units whose step is complete.
        """
        if self._deferred and os.getpid() != self._owner:
            raise TierError(f"unit '{self._deferred[0].name}' is stepped by process {self._owner}, from which this one was "
                            f"forked; read weights in the process that trains")
        while self._deferred and (unit is None or unit.awaits_step):
            if wait:
                with self._lock, self._lanes.during("wait", self._deferred[0].name):
                    self._changed.wait_for(lambda: self._num_stepped or self._failure is not None)
            if not self._num_stepped:
                break
            _finish_deferred(self._deferred[0])
            self._deferred.popleft()
            with self._lock:
                self._num_stepped -= 1
        if wait and (unit is None or unit.awaits_step):
            self.check()

    def close(self) -> None:
        """Drop the queued chunks, and wait for the one that is being stepped."""
        with self._lock:
            self._queue.clear()
        self._join()

    def check(self) -> None:
        """Raise `TierError` if a step failed halfway."""
        if self._failure is not None:
            self.fail(self._failure)  # the thread only records it
            cause = str(self._failure) or type(self._failure).__name__
            raise TierError(f"a step was taken in part, and its weights are of no use: load a checkpoint into a new engine. "
                            f"What went wrong: {cause}") from self._failure

    @property
    def failed(self) -> bool:
        """Whether a step failed halfway, so that the weights are invalid."""
        return self._failure is not None

    def _end_backward_step(self, unit: TrainableUnit) -> None:
        """Publish a unit that backward has stepped; a step still in the thread becomes an ordinary deferred one."""
        step = unit.pending
        assert isinstance(step, DeferredStep)
        if not _can_defer(unit):
            step.finish()
        step.leave_backward()
        if step.is_taken:
            _publish(unit)

    def _wait_for_memory(self, unit: TrainableUnit) -> None:
        """Wait until the memory that `unit` holds until its step fits within `max_waiting_bytes`."""
        size = unit.gradient.bytes * (2 if unit.state.stepped_weights is None else 1) if unit.state.rests_on_disk else 0
        with self._lock, self._lanes.during("wait", unit.name):
            self._changed.wait_for(lambda: self.failed or not (held := sum(self._waiting_bytes.values()))
                                   or held + size <= self._max_waiting_bytes)
            self._waiting_bytes[unit] = size
        self.check()

    def _defer(self, units: list[TrainableUnit], chunks: Iterable[_StepChunk]) -> None:
        """Hand `units` to the thread. An exception here leaves the step incomplete, so it fails."""
        if not units:
            return
        try:
            for unit in units:
                if unit.pending is None:
                    unit.begin_step(DeferredStep(self, unit))
            stream = stream_of_thread(self._device)
            if stream != self._thread_stream:  # one thread works in one stream
                self._join()
            with self._lock:
                self._deferred.extend(units)
                self._queue.extend(chunks)
                idle, self._idle = self._idle, False
            if idle:
                self._join()
                self._thread_stream = stream
                self._thread = threading.Thread(target=self._run_thread, args=(stream,), name="shoal-step")
                self._thread.start()
        except BaseException as error:
            self.fail(error)
            raise

    def _join(self) -> None:
        """Wait until the thread has ended, which has then stepped its whole queue or failed."""
        if self._thread is not None:
            self._thread.join()

    def _run_thread(self, stream: torch.Stream | None) -> None:
        """Take the deferred steps; the body of the thread.

        It gives the device's work to `stream`, that of the pass which made the gradients: a new thread would begin with the
        default stream of the first device, and end by making that device current, which takes its memory.
        """
        try:
            set_current(self._device)
            with within(stream), torch.no_grad():
                for unit in self._stream(self._next_chunk):
                    with self._lock:
                        self._num_stepped += 1
                        self._waiting_bytes.pop(unit, None)
                        self._changed.notify_all()
        except BaseException as error:  # the waiting thread raises it
            with self._lock:
                self._failure = error
                self._changed.notify_all()

    def _next_chunk(self, left: int) -> _StepChunk | None:
        """Return the thread's next chunk. The thread ends if there is none and it has none `left`."""
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._prefetcher.start(self._fetches_ahead + 1 - left)
            self._idle = not left
            return None

    def _fetch(self, chunk: _StepChunk) -> _StepChunk:
        chunk.transfer = JoinedTransfers([view.unit.state.fetch(view.part, chunk.step_pass.access) for view in chunk.views])
        self._prefetcher.release(chunk.views)
        return chunk

    def _stream(self, source: _Source) -> Iterator[TrainableUnit]:
        """Step the chunks of `source`, and yield each unit when it is complete."""
        fetched: deque[_StepChunk] = deque()
        while True:
            while len(fetched) <= self._fetches_ahead and (chunk := source(len(fetched))) is not None:
                fetched.append(self._fetch(chunk))
            if not fetched:
                return
            chunk = fetched.popleft()
            with self._lanes.during("fetch", chunk.name):
                chunk.transfer.wait()
            if chunk.views:
                with self._lanes.during("step", chunk.name):
                    chunk.step_pass.step(chunk.views, chunk.step_pass.factor, chunk.step_pass.options)
            self._commits.append(_commit(chunk))
            for unit in chunk.units:
                _release_gradient(unit, chunk.step_pass)
                yield unit
            while len(self._commits) > self._commits_behind:
                with self._lanes.during("commit", chunk.name):
                    self._commits.popleft().wait()

    def _chunks(self, units: Sequence[TrainableUnit], views: Sequence[MasterView],
                step_pass: StepPass) -> Iterator[_StepChunk]:
        of_unit: dict[TrainableUnit, list[MasterView]] = {unit: [] for unit in units}
        for view in views:
            if view.unit in of_unit:
                of_unit[view.unit].append(view)
        chunk, elements = _StepChunk(step_pass=step_pass), 0
        for unit, unit_views in of_unit.items():
            for view in unit_views:
                size = view.stop - view.start
                if chunk.views and (_is_offloaded(unit) or chunk.is_offloaded or elements + size > self._chunk_elements):
                    yield chunk
                    chunk, elements = _StepChunk(step_pass=step_pass), 0
                chunk.views.append(view)
                elements += size
            chunk.units.append(unit)
        if chunk.views or chunk.units:
            yield chunk


class MomentPrefetcher:
    """Prefetches the moments of views whose step is expected, in the order of the last backward pass. Thread-safe.

    Another order in backward costs time, but is correct.
    """

    def __init__(self) -> None:
        self._scheduled: dict[int, MasterView] = {}  # by id of the view, in order
        self._started: dict[int, MasterView] = {}  # views whose prefetch has started
        self._lock = threading.Lock()

    def schedule(self, views: Iterable[MasterView]) -> None:
        """Expect steps of `views`, whose state is offloaded, in this order; cancel the previous expectation."""
        with self._lock:
            for view in self._started.values():
                _state(view).end_prefetch(view.part)
            self._scheduled, self._started = {id(view): view for view in views}, {}

    def start(self, limit: int) -> None:
        """Start prefetching in order, until `limit` views are prefetched or being so."""
        with self._lock:
            while self._scheduled and len(self._started) < limit:
                key = next(iter(self._scheduled))
                view = self._started[key] = self._scheduled.pop(key)
                _state(view).prefetch(view.part)

    def release(self, views: Iterable[MasterView]) -> None:
        """End the prefetch of `views`: their step has fetched its state."""
        with self._lock:
            for view in views:
                self._scheduled.pop(id(view), None)
                if self._started.pop(id(view), None) is not None:
                    _state(view).end_prefetch(view.part)


def _state(view: MasterView) -> OptimizerState:
    return view.unit.state


def _source_of(chunks: Iterator[_StepChunk]) -> _Source:
    return lambda left: next(chunks, None)


def began_in_backward(unit: TrainableUnit) -> bool:
    """Whether backward has begun the step of `unit`, and `engine.step()` has not completed it yet."""
    return unit.pending is not None and unit.pending.in_backward


def _is_offloaded(unit: TrainableUnit) -> bool:
    """Whether the state of `unit` is offloaded, so that its step fetches it."""
    return unit.state.granule is not None


def _can_defer(unit: TrainableUnit) -> bool:
    """Whether the step of `unit` may be deferred: every read of its weights or state goes through the unit, and publishing
    needs no collective.
    """
    local = not unit.stage.publishes or unit.communicator.ranks == 1
    return local and unit.is_released and not unit.memory.is_exposed and unit.memory.is_offloaded and _is_offloaded(unit)


def _keeps_weights(unit: TrainableUnit, step_pass: StepPass) -> bool:
    return step_pass.access.writes_weights and isinstance(unit.pending, DeferredStep) and unit.pending.keeps_weights


def _release_gradient(unit: TrainableUnit, step_pass: StepPass) -> None:
    """Discard the gradient that `step_pass` has consumed, and unpin weights that stayed resident for it."""
    unit.gradient.free_buffer()
    if step_pass.access.writes_weights and not _keeps_weights(unit, step_pass):
        unit.residency.unpin()


def _finish_deferred(unit: TrainableUnit) -> None:
    """Note that the thread has stepped `unit`, and publish it; `run` publishes a unit that backward began."""
    step = unit.pending
    assert isinstance(step, DeferredStep)
    step.mark_taken()
    if not step.in_backward:
        _publish(unit)


@torch.no_grad()
def _publish(unit: TrainableUnit) -> None:
    """Complete the step of `unit`: reset its gradient, and publish its weights."""
    unit.end_step()
    unit.gradient.mark_consumed()
    unit.publish()


def _commit(chunk: _StepChunk) -> Transfer:
    for view in chunk.views:
        if _keeps_weights(view.unit, chunk.step_pass):
            view.unit.keep_part_resident(view.part, by_step=True)
    return JoinedTransfers([view.unit.state.commit(view.part, chunk.step_pass.access) for view in chunk.views])
