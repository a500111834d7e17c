"""The copies of a training in memory: one every few steps, and on a restart the newest intact one.

A copy is of the time between two steps: it is taken when training goes on after a step, so that what the script has done
since is in it (a schedule of its own, weights that it clips), and a rank that dies in an evaluation or a save repeats it.
Random states, and the position of the loader, are those of before the next batch was drawn.

Engines that take their steps in turns, as the two of a GAN, go on from one moment: once all have taken a step. A copy waits
for that, and all of a step have its random states, so that a restart may load them in any order.

A restart loads the newest state that is intact: a copy, where it is newer than the checkpoint on disk or where that is
damaged. Copies belong to one line of steps: those of later steps than the state that was loaded are removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from shoal.checkpoint import FILE_BYTES, Ranks, rng, tags
from shoal.engine.saved_values import shared_values
from shoal.engine.state_loader import ClientState, Loaded, StateLoader, Wanted
from shoal.engine.training_objects import TrainingObjects
from shoal.engine.training_state import AWAY_BYTES, coming_moments, is_away, state_to_save
from shoal.errors import CheckpointDamaged, CheckpointError
from shoal.interchange import damage, latest
from shoal.log import logger, warn_once
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.resilience.vault import GENERATIONS, Generation, Vault
from shoal.transport.failure_board import interruptible_wait

__all__ = ["MemoryCopies"]


_POSITION = "trainer_state.json"
"""The file in which the Trainer of transformers keeps its position, beside a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    """A copy that is to be taken when training goes on, and what it has of the time before that."""

    training: TrainingObjects
    random: dict[str, object]
    data: dict[str, Any] | None

    @classmethod
    def now(cls, training: TrainingObjects) -> _Due:
        """Return one of `training` as it is at present, between two steps."""
        loader = training.dataloader
        return cls(training=training, random=rng.capture(), data=None if loader is None else loader.state_dict())


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnDisk:
    """The complete checkpoints of a folder, as all ranks see them."""

    step: int
    """That of the one that `latest` names; -1 where none is there."""
    others: int
    """The most steps of another one; -1 where none is there."""
    of_one_step: bool
    """Whether the folder is of that step alone: its name has the number, or the Trainer's position is in it."""


class MemoryCopies:
    """The copies of one engine's training in its vault."""

    _of_process: ClassVar[WeakKeyDictionary[MemoryCopies, None]] = WeakKeyDictionary()
    """Those of the engines of this process that have an optimizer."""

    def __init__(self, vault: Vault, stage: int, parameter_groups: ParameterGroups, loader: StateLoader,
                 ranks: Callable[[], Ranks]) -> None:
        """`loader` loads copies as it loads checkpoints, with the same `ranks`."""
        self._vault = vault
        self._stage = stage
        self._parameter_groups = parameter_groups
        self._loader = loader
        self._ranks = ranks
        self._has_stepped = False
        """Whether this process has taken a step: a load is then no restart, and reads the folder."""
        self._goes_on_from: int | None = None
        """The steps of the state that was loaded since the last step: copies of more belong to a training that was left."""
        self._step = 0
        """Steps of the training."""
        self._due: _Due | None = None
        self._evaluated: set[bool] = set()
        """The modes of the forwards without gradients since the last step: whether the model was in training."""
        self._begins_by: set[bool] = set()
        """Those that had followed the step before: such forwards make the data of steps, as rollouts and generators do."""

    @property
    def come_first(self) -> bool:
        """Whether a load without a tag is that of a restart, which takes the newest state, wherever it is."""
        return not self._has_stepped

    def go_on_from(self, step: int) -> None:
        """Note that the state of `step` was loaded."""
        self._goes_on_from = self._step = step

    def reserve(self, training: TrainingObjects) -> None:
        """Check that memory has room for the copies of `training`; a collective call.

        Raises `VaultTooLarge` on every rank where a node has not.
        """
        if training.optimizer is None:
            return
        self._of_process.setdefault(self)
        coming = coming_moments(training.optimizer)
        pieces = state_to_save(training.sharded, training.optimizer, "initialize", exclude_frozen=False)
        self._vault.reserve(sum(piece.data.nbytes for piece in pieces) + coming.saved, coming.in_memory)

    @property
    def is_due(self) -> bool:
        """Whether the state after the last step has not been copied yet and is to be, alike on every rank."""
        return self._due is not None

    def is_due_before_forward(self, *, grads: bool, training: bool) -> bool:
        """Whether it is to be copied before a forward that comes now, with `grads` or not, of a model in `training` or not.

        Not while an engine that takes its steps in turns with this one has still to take the last one: this forward is then
        part of that step.
        """
        goes_on = training and (grads or training in self._begins_by)
        return self.is_due and goes_on and not any(other._step == self._step - 1 for other in self._of_process)

    def note_step(self, training: TrainingObjects) -> None:
        """Note a step, and whether its state is to be copied when training goes on; every rank calls it after each step.

        The first step after a load removes the copies of later steps, with which the training does not go on.
        """
        step = training.progress.global_steps
        if not self._has_stepped and self._vault.begin(step) and self._goes_on_from is None:
            logger.warning("resilience.vault: copies in memory of an earlier attempt are removed, because the script takes "
                           "step %d without having loaded them; call engine.load_checkpoint(folder) before the first step, "
                           "at every start", step)
        self._has_stepped, self._step = True, step
        if self._goes_on_from is not None:
            self._vault.wait_until_ended()
            self._vault.forget_after(self._goes_on_from)
            self._goes_on_from = None
        self._due = None
        self._begins_by, self._evaluated = self._evaluated, set()
        for copies in self._taking(step):
            copies._note_end_of_step()
        if self._vault.is_due(step):
            self._vault.writer()  # every rank is here; a forward may come on some ranks alone
            self._due = _Due.now(training)

    def note_evaluation(self, *, training: bool) -> None:
        """Note that a forward without gradients, or of a model not in `training`, has followed the last step.

        After a restart it is not repeated, nor what it drew. One that follows every step begins an iteration, and is
        repeated.
        """
        self._evaluated.add(training)
        if training not in self._begins_by:
            for copies in self._taking(self._step):
                copies._note_random_states()

    def _taking(self, step: int) -> list[MemoryCopies]:
        """Return those of the engines that have taken `step` last: they take it in turns with this one."""
        return [copies for copies in self._of_process if copies._step == step]

    def _note_end_of_step(self) -> None:
        """Let the copy that is due go on from the present: another engine has ended the step."""
        if self._due is not None:
            self._due = _Due.now(self._due.training)

    def _note_random_states(self) -> None:
        """Let it go on from the present random states; an evaluation draws nothing of the training data."""
        if self._due is not None:
            self._due = replace(self._due, random=rng.capture())

    def forget_due(self) -> None:
        """Take no copy of the last step: another state is loaded."""
        self._due = None

    def copy(self, training: TrainingObjects, client: ClientState) -> None:
        """Copy `training` if a copy is due; every rank calls it before it trains on, with the weights of the last step.

        A copy that fails is logged, and training goes on.
        """
        due, self._due = self._due, None
        if due is None:
            return
        if training.optimizer is not None and training.optimizer.begun:
            warn_once("resilience.vault: a copy is left out, because a backward has stepped some weights already "
                      "(offload_optimizer.step_in_backward) after a forward that was no call of the engine in training "
                      "mode: call engine(...) after engine.train()")
            return
        self._vault.wait_for_others()
        training.sharded.load_replaced()
        pieces = state_to_save(training.sharded, training.optimizer, "forward", exclude_frozen=False)
        writer = self._vault.writer()
        away = is_away(pieces)
        with _copy_may_fail(), interruptible_wait(lambda: None):  # for other ranks, of which one may be lost
            writer.wait()  # for the last copy: whether it failed or not, every rank begins this one
        step = training.progress.global_steps
        with _copy_may_fail():
            pending = writer.write(
                self._vault.folder, f"step{step}", pieces, step=step, keep_last=GENERATIONS, read_back=False,
                file_bytes=AWAY_BYTES if away else FILE_BYTES, private={"random": due.random},
                shared=shared_values(training, self._parameter_groups, self._stage, client.values, client.step, due.data,
                                     exclude_frozen=False))
            if away:
                pending.wait()

    def wait(self) -> None:
        """Wait until the copy that is under way has ended, however it does."""
        self._vault.wait_until_ended()

    def end(self) -> None:
        """Wait as `wait` does, and keep no room for further copies: the engine takes no more steps."""
        self.wait()
        self._of_process.pop(self, None)
        self._vault.release()

    def load_newer(self, training: TrainingObjects, load_dir: Path, *, strict: bool,
                   ) -> tuple[Loaded | None, CheckpointError | None]:
        """Load the newest intact copy that is newer than the checkpoint in `load_dir`, with all that it has.

        A folder of one step is loaded itself, for the script takes its position from it. A collective call. Returns what
        was loaded, None where there is no such copy; and why the last damaged copy could not be.
        """
        disk = self._look(load_dir)
        copies = self._vault.generations(disk.step)
        if disk.of_one_step and copies:
            if self._parameter_groups.world.rank == 0:
                logger.warning("load_checkpoint: the copies of steps up to %d in memory are not taken, because %s is the "
                               "folder of step %d alone, from which a script knows its position; the steps since are taken "
                               "again. To go on from copies save all checkpoints in one folder, and take the position from "
                               "engine.global_steps", max(copy.step for copy in copies), load_dir, disk.step)
            copies = []
        loaded, failure = self._load_first(training, copies, load_dir, strict=strict)
        if loaded is None:
            self._goes_on_from = disk.step
        elif disk.step < 0 and self._parameter_groups.world.rank == 0 and (fault := damage(load_dir)) is not None:
            _warn_of_place_taken(loaded, fault)
        return loaded, failure

    def load_stand_in(self, training: TrainingObjects, load_dir: Path, fault: CheckpointDamaged, *,
                      strict: bool) -> Loaded | None:
        """Load the newest intact copy in the place of the checkpoint on disk, which is damaged by `fault`.

        None where memory has no copy that is as new as the other checkpoints of the folder; nothing is loaded then. A
        collective call.
        """
        disk = self._look(load_dir)
        copies = [copy for copy in self._vault.stand_ins(disk.step, disk.others - 1)
                  if copy.step == disk.step or not disk.of_one_step]
        loaded, _ = self._load_first(training, copies, load_dir, strict=strict)
        if loaded is not None and self._parameter_groups.world.rank == 0:
            _warn_of_place_taken(loaded, fault)
        return loaded

    def _look(self, load_dir: Path) -> _OnDisk:
        """Look at the checkpoints of a folder. A collective call."""
        name = latest(load_dir)
        found = tags(load_dir) if load_dir.is_dir() else []
        step, others = (max((tag.step for tag in found if (tag.name == name) is is_latest), default=-1)
                        for is_latest in (True, False))
        seen = self._parameter_groups.world.gather_objects((step, others, (load_dir / _POSITION).exists()))
        step, others = max(each[0] for each in seen), max(each[1] for each in seen)
        named = step in map(int, re.findall(r"\d+", load_dir.name))
        return _OnDisk(step=step, others=others, of_one_step=step >= 0 and (named or any(each[2] for each in seen)))

    def _load_first(self, training: TrainingObjects, copies: list[Generation], load_dir: Path, *, strict: bool,
                    ) -> tuple[Loaded | None, CheckpointError | None]:
        """Load the first of `copies` that is intact, and remove those before it.

        A copy is the training itself: what the script leaves out of a folder, as fine-tuning does, is of that folder.
        Returns what was loaded, None where no copy was; and why the last damaged copy could not be.
        """
        wanted = Wanted(strict=strict, moments=True, optimizer=True, schedule=True, everything=True)
        failure: CheckpointError | None = None
        for copy in copies:
            try:
                loaded = self._loader.load(training, wanted, self._vault.open(copy, self._ranks()))
            except CheckpointError as error:
                self._vault.remove(copy, error)
                failure = error
                continue
            others = self._vault.disagreement(copy.step)
            if self._parameter_groups.world.rank == 0:
                logger.info("load_checkpoint: loaded the copy of step %d in memory, not %s", copy.step, load_dir)
                if others:
                    logger.warning("load_checkpoint: loaded the copy of step %d in memory, and another engine has copies of "
                                   "steps %s alone; if the two train together, they are out of step: give both the same "
                                   "resilience.vault.every, or load checkpoints by their tag", copy.step, others)
                _warn_of_client_state(copy.step, loaded.client)
            return loaded, failure
        return None, failure


def _warn_of_place_taken(loaded: Loaded, fault: CheckpointDamaged | str) -> None:
    """Warn that a copy took the place of the checkpoint on disk, which is damaged by `fault`."""
    logger.warning("load_checkpoint: the newest checkpoint is damaged, and the copy of step %d in memory took its place: %s",
                   loaded.step, fault)


def _warn_of_client_state(step: int, client: ClientState) -> None:
    """Warn that the client state of the copy of `step` is not of its step, unless the script has saved an empty one."""
    if client.step is None:
        found = "is empty, for the script has saved none"
    elif client.step != step and client.values:
        found = f"is that of step {client.step}, which was saved last"
    else:
        return
    warn_once(f"load_checkpoint: the client state of the copy of step {step} in memory {found}; take the position of "
              f"the script from engine.global_steps and the loader, not from the client state")


@contextmanager
def _copy_may_fail() -> Generator[None]:
    """Log the failure of a copy, and let training go on."""
    try:
        yield
    except CheckpointError as error:
        logger.warning("resilience.vault: a copy failed, and training goes on without it: %s", error)
