"""Saving and loading a training: its tensors as pieces, its counters as values, all ranks in agreement.

A checkpoint holds everything that the next step depends on. Files are written while training goes on: `save` returns once
the state is copied. A failure of the write is raised by the next `save`, by `wait`, or when the engine is destroyed;
where none of these follows, it is in the exit code of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shoal.checkpoint import (
    FILE_BYTES,
    Piece,
    Ranks,
    Snapshot,
    Writer,
    extra_states,
    load_extra_states,
    read_unpublished,
    rng,
    tags,
    wait_for_saves,
)
from shoal.engine.progress import Progress
from shoal.engine.schema import Config
from shoal.engine.training_state import (
    PUBLISHED,
    coming_moments,
    compression_to_save,
    data_state,
    group_names,
    moments_to_load,
    moments_to_save,
    parameter_shapes,
    published_pieces,
    residual_pieces,
    residual_ranks,
    weights_to_load,
    weights_to_save,
)
from shoal.errors import CheckpointDamaged, CheckpointError, RanksDisagree, UsageError
from shoal.interchange import damage, latest, open_checkpoint
from shoal.interchange.writer import Target, write_ranks
from shoal.log import logger, warn_once
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.optim.masks import MASK
from shoal.optim.sharded import ShardedOptimizer
from shoal.resilience.guard import Guard
from shoal.resilience.vault import GENERATIONS, Generation, Vault
from shoal.schedule.registry import AnySchedule
from shoal.zero.sharded import ShardedModel
from shoal.zero.trainable_unit import TrainableUnit
from shoal.zero.unit import Unit

__all__ = ["Checkpointer", "TrainingObjects"]

T = TypeVar("T")

EXTRA = "extra_states"
"""The key of the modules' extra state among the shared values; older checkpoints have none."""

CLIENT_STEP = "client_step"
"""The key of the step at which the client state was saved, which in a copy in memory is an earlier one."""

AWAY_BYTES = 128 << 20
"""Bytes of a file, and of memory to stage it in, when the state is written from where it rests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingObjects:
    """The objects whose state a checkpoint holds."""

    sharded: ShardedModel
    optimizer: ShardedOptimizer | None
    lr_scheduler: AnySchedule | None
    dataloader: Any
    progress: Progress
    guard: Guard | None
    compute: torch.dtype
    """The dtype of weights in forward and backward."""
    accumulation: int
    """Microbatches of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """The parts of a checkpoint that are loaded."""

    strict: bool
    moments: bool
    optimizer: bool
    schedule: bool
    everything: bool
    """More than the weights."""


class Checkpointer:
    """Saves and loads the training of one engine."""

    def __init__(self, settings: Config, parameter_groups: ParameterGroups, device: torch.device,
                 vault: Vault | None = None):
        self._settings = settings
        self._parameter_groups = parameter_groups
        self._device = device
        self._writer: Writer | None = None
        self._vault = vault
        self._client_state: Mapping[str, Any] = {}
        """The client state that was saved or loaded last, which a copy in memory carries on."""
        self._client_step: int | None = None
        """The step that it was saved at; None before the first save or load."""
        self._has_stepped = False
        """Whether this process has taken a step: a load is then no restart, and reads the folder."""
        self._goes_on_from: int | None = None
        """The steps of the state that was loaded since the last step: copies of more belong to a training that was left."""

    def save(self, training: TrainingObjects, save_dir: str | Path, tag: str | int | None, *,
             client_state: Mapping[str, Any], save_latest: bool, exclude_frozen: bool) -> None:
        """Save `training` as `save_dir/tag`; every rank calls it. See `BaseEngine.save_checkpoint`."""
        if not str(save_dir):
            raise UsageError("save_checkpoint: save_dir is empty; give a folder that all ranks share")
        optimizer = training.optimizer
        if optimizer is not None:
            optimizer.check_not_begun("save_checkpoint")
            if optimizer.has_gradients:
                warn_once("save_checkpoint: saved within an accumulation; the gradients of its unfinished microbatches are "
                          "not in the checkpoint. After a load the loader of initialize delivers their samples again, and "
                          "dropout draws other numbers; save after a step to go on with the same bits")
        tag = self._agree_on_tag(tag, training.progress)
        settings = self._settings.checkpoint
        pieces = self._pieces(training, "save_checkpoint", exclude_frozen=exclude_frozen)
        away = not settings.async_save or _is_away(pieces)
        pending = self._open_writer().write(
            save_dir, tag, pieces, step=training.progress.global_steps, latest=save_latest,
            file_bytes=AWAY_BYTES if away else FILE_BYTES, streamed=not settings.async_save, keep_last=settings.keep_last,
            shared=self._shared_values(training, client_state, training.progress.global_steps, exclude_frozen),
            private={"random": rng.capture()},
            add_files=self._published_files(training))
        self._client_state, self._client_step = client_state, training.progress.global_steps
        if away:
            pending.wait()

    def reserve(self, training: TrainingObjects) -> None:
        """Check that memory has room for the copies of `training`, if there is a vault; a collective call.

        Raises `VaultTooLarge` on every rank where a node has not.
        """
        if self._vault is None or training.optimizer is None:
            return
        coming = coming_moments(training.optimizer)
        pieces = self._pieces(training, "initialize", exclude_frozen=False)
        self._vault.reserve(sum(piece.data.nbytes for piece in pieces) + coming.saved, coming.in_memory)

    def copy_to_vault(self, training: TrainingObjects) -> None:
        """Copy `training` to the vault, if there is one and a copy is due; every rank calls it after each step.

        The first step after a load removes the copies of later steps, with which the training does not go on.

        A copy that fails is logged, and training goes on.
        """
        step = training.progress.global_steps
        if self._vault is None:
            return
        if not self._has_stepped and self._vault.begin(step) and self._goes_on_from is None:
            logger.warning("resilience.vault: copies in memory of an earlier attempt are removed, because the script takes "
                           "step %d without having loaded them; call engine.load_checkpoint(folder) before the first step, "
                           "at every start", step)
        self._has_stepped = True
        if self._goes_on_from is not None:
            self._vault.wait_until_ended()
            self._vault.forget_after(self._goes_on_from)
            self._goes_on_from = None
        if not self._vault.is_due(step):
            return
        self._vault.wait_for_others()
        pieces = self._pieces(training, "step", exclude_frozen=False)
        writer = self._vault.writer()
        away = _is_away(pieces)
        with _copy_may_fail():
            writer.wait()  # for the last copy: whether it failed or not, every rank begins this one
        with _copy_may_fail():
            pending = writer.write(
                self._vault.folder, f"step{step}", pieces, step=step, keep_last=GENERATIONS, read_back=False,
                file_bytes=AWAY_BYTES if away else FILE_BYTES, private={"random": rng.capture()},
                shared=self._shared_values(training, self._client_state, self._client_step, exclude_frozen=False))
            if away:
                pending.wait()

    def _pieces(self, training: TrainingObjects, call: str, *, exclude_frozen: bool) -> list[Piece]:
        """Return the state of this rank at rest."""
        sharded, optimizer = training.sharded, training.optimizer
        if optimizer is not None:
            optimizer.finish_deferred_steps()
        sharded.finish_pending()
        sharded.refuse_replaced(call)
        pieces = list(weights_to_save(sharded))
        if exclude_frozen:
            frozen = {f"weight/{member.name}" for unit in sharded.units if not isinstance(unit, TrainableUnit)
                      for member in unit.members}
            pieces = [piece for piece in pieces if piece.name not in frozen]
        if optimizer is not None:
            pieces += moments_to_save(sharded, optimizer)
            pieces += compression_to_save(sharded)
        return pieces

    def wait(self) -> None:
        """Wait until the last save is complete; raises its `CheckpointError` on every rank if it failed."""
        if self._writer is not None:
            self._writer.wait()

    def wait_for_copy(self) -> None:
        """Wait until the copy to the vault that is under way has ended, however it does."""
        if self._vault is not None:
            self._vault.wait_until_ended()

    def end_copies(self) -> None:
        """Wait as `wait_for_copy` does, and keep no room for further copies: the engine takes no more steps."""
        self.wait_for_copy()
        if self._vault is not None:
            self._vault.release()

    def load(self, training: TrainingObjects, load_dir: str | Path, tag: str | int | None, *, strict: bool,
             optimizer_states: bool, schedule_states: bool, module_only: bool) -> tuple[str | None, dict[str, Any] | None]:
        """Load `load_dir/tag` into `training`; every rank calls it. See `BaseEngine.load_checkpoint`."""
        if training.optimizer is not None:
            training.optimizer.check_not_begun("load_checkpoint")
        self.wait()
        wait_for_saves()  # another engine of this process may be saving the files that are to be loaded
        wanted = _Wanted(strict=strict, moments=optimizer_states and not module_only, optimizer=optimizer_states,
                         schedule=schedule_states, everything=not module_only)
        newest = tag is None and not module_only and not self._has_stepped and self._vault is not None
        failure: CheckpointError | None = None
        if newest:
            copied, failure = self._load_copy(training, Path(load_dir), wanted)
            if copied is not None:
                return copied
        visible = self._parameter_groups.world.gather_objects(tag is not None or latest(Path(load_dir)) is not None)
        if not any(visible):
            if complete := tags(Path(load_dir)):
                raise CheckpointError(f"load_checkpoint: {load_dir} has no file 'latest', and the training would begin "
                                      f"anew; its newest intact checkpoint is {complete[-1].name!r}: load it with "
                                      f"tag={complete[-1].name!r}")
            if failure is not None:
                raise CheckpointError(f"load_checkpoint: the copies in memory are damaged and removed, {load_dir} has no "
                                      f"checkpoint, and this process may have loaded parts of a damaged copy; start it "
                                      f"again, as shoal run does with --max-restarts: the training then begins anew"
                                      ) from failure
            warn_once(f"load_checkpoint: {load_dir} has no file 'latest' and no tag was given; nothing is loaded")
            return None, None
        if not all(visible):
            ranks = [rank for rank, sees in enumerate(visible) if sees]
            raise CheckpointError(f"load_checkpoint: only ranks {ranks} see a file 'latest' in {load_dir}; give a folder "
                                  f"that all ranks share")
        groups = (group_names(training.sharded, training.optimizer) if wanted.moments and training.optimizer is not None
                  else None)
        try:
            return self._load(training, wanted, open_checkpoint(load_dir, None if tag is None else str(tag),
                                                                ranks=self._open_writer().ranks, groups=groups))
        except CheckpointDamaged as error:  # on every rank
            if not newest or (copied := self._load_stand_in(training, Path(load_dir), wanted, error)) is None:
                raise
            return copied

    def _load_copy(self, training: TrainingObjects, load_dir: Path, wanted: _Wanted,
                   ) -> tuple[tuple[str, dict[str, Any]] | None, CheckpointError | None]:
        """Load the newest intact copy of the vault that is newer than the checkpoint on disk.

        Returns what was loaded, None where there is no such copy; and why the last damaged copy could not be.
        """
        assert self._vault is not None
        on_disk, _ = self._steps_on_disk(load_dir)
        loaded, failure = self._load_first(training, wanted, self._vault.generations(on_disk), load_dir)
        if loaded is None:
            self._goes_on_from = on_disk
        elif on_disk < 0 and self._parameter_groups.world.rank == 0 and (fault := damage(load_dir)) is not None:
            logger.warning("load_checkpoint: the newest checkpoint is damaged, and the copy of step %d in memory took its "
                           "place: %s", training.progress.global_steps, fault)
        return loaded, failure

    def _load_stand_in(self, training: TrainingObjects, load_dir: Path, wanted: _Wanted, fault: CheckpointDamaged,
                       ) -> tuple[str, dict[str, Any]] | None:
        """Load the newest intact copy of the vault in the place of the checkpoint on disk, which is damaged by `fault`.

        None where memory has no copy that is as new as the other checkpoints of the folder; nothing is loaded then.
        """
        assert self._vault is not None
        on_disk, others = self._steps_on_disk(load_dir)
        loaded, _ = self._load_first(training, wanted, self._vault.stand_ins(on_disk, others - 1), load_dir)
        if loaded is not None and self._parameter_groups.world.rank == 0:
            logger.warning("load_checkpoint: the newest checkpoint is damaged, and the copy of step %d in memory took its "
                           "place: %s", training.progress.global_steps, fault)
        return loaded

    def _steps_on_disk(self, load_dir: Path) -> tuple[int, int]:
        """Return the steps of the checkpoint that `latest` names, and the most steps of another one; -1 where none is there.

        A checkpoint counts if it is complete. A collective call.
        """
        name = latest(load_dir)
        found = tags(load_dir) if load_dir.is_dir() else []
        seen = self._parameter_groups.world.gather_objects(tuple(
            max((tag.step for tag in found if (tag.name == name) is is_latest), default=-1) for is_latest in (True, False)))
        return max(steps for steps, _ in seen), max(steps for _, steps in seen)

    def _load_first(self, training: TrainingObjects, wanted: _Wanted, copies: list[Generation], load_dir: Path,
                    ) -> tuple[tuple[str, dict[str, Any]] | None, CheckpointError | None]:
        """Load the first of `copies` that is intact, and remove those before it.

        Returns what was loaded, None where no copy was; and why the last damaged copy could not be.
        """
        assert self._vault is not None
        failure: CheckpointError | None = None
        for copy in copies:
            try:
                loaded = self._load(training, wanted, self._vault.open(copy, self._open_writer().ranks))
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
                self._warn_of_client_state(copy.step)
            return loaded, failure
        return None, failure

    def _warn_of_client_state(self, step: int) -> None:
        """Warn that the client state of the loaded copy is not of its step, unless the script has saved an empty one."""
        if self._client_step is None:
            found = "is empty, for the script has saved none"
        elif self._client_step != step and self._client_state:
            found = f"is that of step {self._client_step}, which was saved last"
        else:
            return
        warn_once(f"load_checkpoint: the client state of the copy of step {step} in memory {found}; take the position of "
                  f"the script from engine.global_steps and the loader, not from the client state")

    def _load(self, training: TrainingObjects, wanted: _Wanted, opened: Snapshot) -> tuple[str, dict[str, Any]]:
        training.sharded.finish_pending()
        with opened as snapshot:
            private = self._read_values(snapshot)
            self._check_fit(training, snapshot, strict=wanted.strict, optimizer=wanted.moments, data=wanted.everything)
            self._load_tensors(training, snapshot, strict=wanted.strict, moments=wanted.moments)
            load_extra_states(training.sharded.model, cast("dict[str, Any]", snapshot.shared.get(EXTRA, {})))
            client_state = cast("dict[str, Any]", snapshot.shared.get("client_state", {}))
            if wanted.everything:
                self._load_values(training, snapshot, private, optimizer=wanted.optimizer, schedule=wanted.schedule)
                self._client_state = client_state
                self._client_step = cast("int | None", snapshot.shared.get(CLIENT_STEP, training.progress.global_steps))
                self._goes_on_from = training.progress.global_steps
            return str(snapshot.path), client_state

    def _open_writer(self) -> Writer:
        if self._writer is None:  # every rank comes here at its first save or load
            self._writer = Writer(Ranks.join(self._parameter_groups.world.group))
        return self._writer

    def _published_files(self, training: TrainingObjects) -> Callable[[Path], None] | None:
        """Return the function that writes this rank's files of DeepSpeed's layout, None where none are asked for."""
        if self._settings.checkpoint.layout == "shoal":
            return None
        mesh, data = self._parameter_groups.mesh, self._parameter_groups.data
        if mesh.size("pipeline") > 1 or mesh.size("tensor") > 1 or training.optimizer is None:
            warn_once("checkpoint.layout: deepspeed is written for data-parallel training with an optimizer; this training "
                      "is saved in Shoal's files alone, and `shoal checkpoint convert` writes its weights for DeepSpeed")
            return None
        settings = self._settings
        target = Target(stage=settings.zero_optimization.stage, ranks=data.ranks, dtype=training.compute,
                        clip_grad=settings.gradient_clipping, config=settings.model_dump(mode="json"))

        def write(folder: Path) -> None:
            with read_unpublished(folder) as snapshot:
                write_ranks(snapshot, folder, target, [data.rank])

        return write

    def _agree_on_tag(self, tag: str | int | None, progress: Progress) -> str:
        tags = self._parameter_groups.world.gather_objects(
            f"global_step{progress.global_steps}" if tag is None else str(tag))
        if len(set(tags)) > 1:
            by_rank = "; ".join(f"rank {rank}: {each!r}" for rank, each in enumerate(tags))
            match self._settings.checkpoint.tag_validation:
                case "Fail":
                    raise RanksDisagree(f"save_checkpoint: ranks save under different tags ({by_rank}); give all the same")
                case "Warn":
                    warn_once(f"save_checkpoint: ranks save under different tags ({by_rank}); rank 0's is taken")
                case "Ignore":
                    pass
        return tags[0]

    def _shared_values(self, training: TrainingObjects, client_state: Mapping[str, Any], client_step: int | None,
                       exclude_frozen: bool) -> dict[str, object]:
        """Return the values that are the same on every rank; the client state is of step `client_step`."""
        sharded, optimizer = training.sharded, training.optimizer
        kept = {name for name, p in sharded.named().items() if p.requires_grad or not exclude_frozen}
        shapes = {name: shape for name, shape in parameter_shapes(sharded).items() if name in kept}
        return {
            **training.progress.counters(),
            "parameters": self._of_all_stages(shapes),
            "tied": self._of_all_stages(sharded.tied_names()),
            EXTRA: self._of_all_stages(extra_states(sharded.model)),
            "stage": self._settings.zero_optimization.stage,
            "mesh": self._parameter_groups.mesh.ranks.tolist(),
            "optimizer": None if optimizer is None else type(optimizer.optimizer).__name__,
            "groups": [{key: value for key, value in group.items() if key not in ("params", MASK)}
                       for group in ([] if optimizer is None else optimizer.param_groups)],
            "group_names": None if optimizer is None else self._names_of_groups(sharded, optimizer),
            "loss_scale": {} if optimizer is None else optimizer.scaler.state_dict(),
            "residual_scale": 1.0 if optimizer is None else optimizer.scaler.value,
            "lr_scheduler": None if training.lr_scheduler is None else dict(training.lr_scheduler.state_dict()),
            "data": data_state(training.dataloader, training.optimizer),
            "guard": None if training.guard is None else training.guard.state_dict(),
            "client_state": dict(client_state),
            CLIENT_STEP: client_step,
        }

    def _of_all_stages(self, facts: dict[str, T]) -> dict[str, T]:
        """Return the union of the `facts` of all pipeline stages."""
        gathered = self._parameter_groups.communicator("pipeline").gather_objects(facts)
        return {name: fact for each in gathered for name, fact in each.items()}

    def _names_of_groups(self, sharded: ShardedModel, optimizer: ShardedOptimizer) -> list[list[str]]:
        """Return the names of the parameters of each optimizer group, of all pipeline stages."""
        stages = self._parameter_groups.communicator("pipeline").gather_objects(group_names(sharded, optimizer))
        return [list(dict.fromkeys(name for names in groups for name in names)) for groups in zip(*stages, strict=True)]

    def _load_tensors(self, training: TrainingObjects, snapshot: Snapshot, *, strict: bool, moments: bool) -> None:
        sharded = training.sharded
        pieces = list(weights_to_load(sharded, snapshot, strict=strict))
        if moments and training.optimizer is not None:
            pieces += self._moments(sharded, training.optimizer, snapshot)
        sharded.set_compression(gradient=False, weights=False, skip_sync=False)
        snapshot.fill(pieces)
        names = set(snapshot.names()) if moments else set[str]()
        following = [unit for unit in sharded.trainable if unit.has_separate_master
                     and all(f"{PUBLISHED}/{member.name}" in names for member in unit.members)]
        for unit in sharded.trainable:
            if unit not in following:
                unit.cast_master_to_weights()
        snapshot.fill([piece for unit in following for piece in published_pieces(unit, sharded.tensor_slices)])
        for unit in sharded.units:
            unit.versions.mark(range(len(unit.members)))
        for unit in sharded.trainable:
            unit.publish()
        self._load_residuals(sharded, snapshot if moments else None)

    def _moments(self, sharded: ShardedModel, optimizer: ShardedOptimizer, snapshot: Snapshot) -> list[Piece]:
        """Return the pieces of the optimizer's state; if a rank finds a damaged number, every rank raises."""
        damaged: CheckpointDamaged | None = None
        pieces: list[Piece] = []
        try:
            pieces += moments_to_load(sharded, optimizer, snapshot)
        except CheckpointDamaged as error:
            damaged = error

        def report() -> None:
            if damaged is not None:
                raise damaged

        ranks = self._open_writer().ranks
        with ranks.lock:
            ranks.run_collectively(f"could not load {snapshot.path}", report)
        return pieces

    @torch.no_grad()
    def _load_residuals(self, sharded: ShardedModel, snapshot: Snapshot | None) -> None:
        """Load the compression errors: rank r of N sums the residuals that ranks r, r+N, r+2N, ... have saved."""
        saved_ranks = {} if snapshot is None else residual_ranks(snapshot)
        # without compression one rank adds its sum to the gradient at once
        units = [unit for unit in sharded.trainable if saved_ranks or unit.transport.is_compressible]
        residuals: dict[Unit, Tensor] = {}
        for number in range(max(saved_ranks.values(), default=0)):
            filled = {unit: torch.zeros(unit.layout.size, dtype=torch.float32, device=self._device) for unit in units
                      if number % unit.communicator.ranks == unit.communicator.rank}
            assert snapshot is not None
            pieces = (piece for unit, values in filled.items()
                      for piece in residual_pieces(unit, values, number, sharded.tensor_slices))
            snapshot.fill([piece for piece in pieces if number < saved_ranks.get(piece.name.partition("/")[2], 0)])
            for unit, values in filled.items():
                residuals[unit] = residuals[unit].add_(values) if unit in residuals else values
        for unit in units:
            unit.gradient.load_residual(residuals.get(unit))

    def _read_values(self, snapshot: Snapshot) -> dict[str, object] | None:
        """Read the values that are no tensors of the model, so that every rank reports damage before anything changes.

        Return this rank's private values; None if the checkpoint was saved on another mesh.
        """
        everyone, ranks = self._parameter_groups.world, self._open_writer().ranks
        mesh = self._parameter_groups.mesh.ranks.tolist()

        def values() -> dict[str, object] | None:
            _ = snapshot.shared
            same = snapshot.ranks == everyone.ranks and snapshot.shared.get("mesh", mesh) == mesh
            return snapshot.private(everyone.rank) if same else None

        with ranks.lock:
            return ranks.run_collectively(f"could not load {snapshot.path}", values)

    def _check_fit(self, training: TrainingObjects, snapshot: Snapshot, *, strict: bool, optimizer: bool,
                   data: bool) -> None:
        """Raise `CheckpointError` if the checkpoint does not fit the model, the optimizer or the data; nothing changes."""
        shared = snapshot.shared
        known = self._of_all_stages(parameter_shapes(training.sharded))
        extra = [name for name in cast("dict[str, object]", shared["parameters"]) if name not in known]
        if strict and extra:
            raise CheckpointError(f"{snapshot.path} holds {len(extra)} parameters that this model has not, the first is "
                                  f"'{extra[0]}'; build the same model, or load with load_module_strict=False")
        saved_extra = cast("dict[str, object]", shared.get(EXTRA, {}))
        lacking = [name for name in self._of_all_stages(extra_states(training.sharded.model)) if name not in saved_extra]
        if lacking and EXTRA not in shared:
            warn_once(f"load_checkpoint: {snapshot.path} holds no extra state of modules; '{lacking[0]}' keeps its value")
        elif strict and lacking:
            raise CheckpointError(f"{snapshot.path} holds no '{lacking[0]}', which get_extra_state of this model returns; "
                                  f"build the same model, or load with load_module_strict=False")
        if optimizer and training.optimizer is not None:
            saved, here = shared.get("optimizer"), type(training.optimizer.optimizer).__name__
            if saved is not None and saved != here and {saved, here} != {"Adam", "AdamW"}:
                raise CheckpointError(f"{snapshot.path} holds the state of {saved}, and this engine steps by {here}; use "
                                      f"the same optimizer, or load with load_optimizer_states=False")
            groups = cast("list[object]", shared["groups"])
            if len(groups) != len(training.optimizer.param_groups):
                raise CheckpointError(f"the checkpoint has {len(groups)} optimizer groups, this engine "
                                      f"{len(training.optimizer.param_groups)}; build the same groups, or load with "
                                      f"load_optimizer_states=False")
        if data and training.dataloader is not None and shared["data"] is not None:
            training.dataloader.check(shared["data"])

    def _load_values(self, training: TrainingObjects, snapshot: Snapshot, private: dict[str, object] | None, *,
                     optimizer: bool, schedule: bool) -> None:
        shared = snapshot.shared
        training.progress.load_counters(shared, training.accumulation)
        if training.guard is not None:
            training.guard.load_state_dict(cast("dict[str, Any]", shared.get("guard") or {}))
        if optimizer and training.optimizer is not None:
            saved_groups = cast("list[dict[str, Any]]", shared["groups"])
            for group, options in zip(training.optimizer.param_groups, saved_groups, strict=True):
                group.update(options)
            training.optimizer.scaler.load_state_dict(cast("dict[str, Any]", shared["loss_scale"]))
            scale = training.optimizer.scaler.value  # the configuration of this engine may have set another one
            training.optimizer.rescale_residuals(scale / cast("float", shared.get("residual_scale", scale)))
        if schedule and training.lr_scheduler is not None and shared["lr_scheduler"] is not None:
            training.lr_scheduler.load_state_dict(cast("dict[str, Any]", shared["lr_scheduler"]))
        if training.dataloader is not None and shared["data"] is not None:
            training.dataloader.load_state_dict(shared["data"])
        if training.optimizer is not None:
            training.optimizer.set_compression()
        if private is not None:
            rng.restore(cast("dict[str, object]", private["random"]))
        else:
            logger.info("%s was saved by %d ranks and is loaded by %d, or on another mesh, or by DeepSpeed: random states "
                        "are not restored", snapshot.path, snapshot.ranks, self._parameter_groups.world.ranks)


def _is_away(pieces: list[Piece]) -> bool:
    """Whether some pieces do not rest in memory, so that they are written from where they are, while the caller waits."""
    return any(piece.hold is not None for piece in pieces)


@contextmanager
def _copy_may_fail() -> Generator[None]:
    """Log the failure of a copy to the vault, and let training go on."""
    try:
        yield
    except CheckpointError as error:
        logger.warning("resilience.vault: a copy failed, and training goes on without it: %s", error)
