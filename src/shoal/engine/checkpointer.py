"""Saving and loading a training: its tensors as pieces, its counters as values, all ranks in agreement.

A checkpoint holds everything that the next step depends on. Files are written while training goes on: `save` returns once
the state is copied. A failure of the write is raised by the next `save`, by `wait`, or when the engine is destroyed;
where none of these follows, it is in the exit code of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import FILE_BYTES, Ranks, Writer, read_unpublished, rng, tags, wait_for_saves
from shoal.engine.memory_copies import MemoryCopies
from shoal.engine.progress import Progress
from shoal.engine.saved_values import shared_values
from shoal.engine.schema import Config
from shoal.engine.state_loader import ClientState, Loaded, StateLoader, Wanted
from shoal.engine.training_objects import TrainingObjects
from shoal.engine.training_state import AWAY_BYTES, data_state, group_names, is_away, state_to_save
from shoal.errors import CheckpointDamaged, CheckpointError, RanksDisagree, UsageError
from shoal.interchange import latest, open_checkpoint
from shoal.interchange.writer import Target, write_ranks
from shoal.log import warn_once
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.resilience.vault import Vault

__all__ = ["Checkpointer"]


class Checkpointer:
    """Saves and loads the training of one engine."""

    def __init__(self, settings: Config, parameter_groups: ParameterGroups, device: torch.device,
                 vault: Vault | None = None):
        self._settings = settings
        self._parameter_groups = parameter_groups
        self._writer: Writer | None = None
        self._loader = StateLoader(parameter_groups, device, self._ranks)
        self._copies = None if vault is None else MemoryCopies(vault, settings.zero_optimization.stage, parameter_groups,
                                                               self._loader, self._ranks)
        self._client = ClientState(values={}, step=None)
        """The client state that was saved or loaded last, which a copy in memory carries on."""

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
        pieces = state_to_save(training.sharded, optimizer, "save_checkpoint", exclude_frozen=exclude_frozen)
        away = not settings.async_save or is_away(pieces)
        pending = self._open_writer().write(
            save_dir, tag, pieces, step=training.progress.global_steps, latest=save_latest,
            file_bytes=AWAY_BYTES if away else FILE_BYTES, streamed=not settings.async_save, keep_last=settings.keep_last,
            shared=shared_values(training, self._parameter_groups, self._settings.zero_optimization.stage, client_state,
                                 training.progress.global_steps, data_state(training.dataloader, optimizer),
                                 exclude_frozen=exclude_frozen),
            private={"random": rng.capture()},
            add_files=self._published_files(training))
        self._client = ClientState(values=dict(client_state), step=training.progress.global_steps)
        if away:
            pending.wait()

    def reserve(self, training: TrainingObjects) -> None:
        """Check that memory has room for the copies of `training`, if it is copied; a collective call.

        Raises `VaultTooLarge` on every rank where a node has not.
        """
        if self._copies is not None:
            self._copies.reserve(training)

    def note_step(self, training: TrainingObjects) -> None:
        """Note a step, and whether its state is to be copied to memory; every rank calls it after each step."""
        if self._copies is not None:
            self._copies.note_step(training)

    def note_evaluation(self, *, training: bool) -> None:
        """Note a forward without gradients, or of a model not in `training`, which may have drawn random numbers."""
        if self._copies is not None:
            self._copies.note_evaluation(training=training)

    @property
    def copy_is_due(self) -> bool:
        """Whether the state after the last step is to be copied to memory, alike on every rank."""
        return self._copies is not None and self._copies.is_due

    def copy_is_due_before_forward(self, *, grads: bool, training: bool) -> bool:
        """Whether it is to be copied before the forward that comes, with `grads` or not, of a model in `training` or not."""
        return self._copies is not None and self._copies.is_due_before_forward(grads=grads, training=training)

    def copy_to_memory(self, training: TrainingObjects) -> None:
        """Copy `training` to memory where that is due; every rank calls it before it trains on."""
        if self._copies is not None:
            self._copies.copy(training, self._client)

    def wait(self) -> None:
        """Wait until the last save is complete; raises its `CheckpointError` on every rank if it failed."""
        if self._writer is not None:
            self._writer.wait()

    def wait_for_copy(self) -> None:
        """Wait until the copy in memory that is under way has ended, however it does."""
        if self._copies is not None:
            self._copies.wait()

    def end_copies(self) -> None:
        """Wait as `wait_for_copy` does, and keep no room for further copies: the engine takes no more steps."""
        if self._copies is not None:
            self._copies.end()

    def load(self, training: TrainingObjects, load_dir: str | Path, tag: str | int | None, *, strict: bool,
             optimizer_states: bool, schedule_states: bool, module_only: bool) -> tuple[str | None, dict[str, Any] | None]:
        """Load `load_dir/tag` into `training`; every rank calls it. See `BaseEngine.load_checkpoint`."""
        if training.optimizer is not None:
            training.optimizer.check_not_begun("load_checkpoint")
        self.wait()
        wait_for_saves()  # another engine of this process may be saving the files that are to be loaded
        wanted = Wanted(strict=strict, moments=optimizer_states and not module_only, optimizer=optimizer_states,
                        schedule=schedule_states, everything=not module_only)
        if self._copies is not None:
            self._copies.forget_due()
        restart = self._copies if (tag is None and not module_only and self._copies is not None
                                   and self._copies.come_first) else None
        failure: CheckpointError | None = None
        if restart is not None:
            copied, failure = restart.load_newer(training, Path(load_dir), strict=strict)
            if copied is not None:
                return self._take(copied, wanted)
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
            if self._parameter_groups.world.rank == 0:
                warn_once(f"load_checkpoint: {load_dir} has no file 'latest' and no tag was given; nothing is loaded")
            return None, None
        if not all(visible):
            ranks = [rank for rank, sees in enumerate(visible) if sees]
            raise CheckpointError(f"load_checkpoint: only ranks {ranks} see a file 'latest' in {load_dir}; give a folder "
                                  f"that all ranks share")
        groups = (group_names(training.sharded, training.optimizer) if wanted.moments and training.optimizer is not None
                  else None)
        try:
            loaded = self._loader.load(training, wanted, open_checkpoint(load_dir, None if tag is None else str(tag),
                                                                         ranks=self._ranks(), groups=groups))
        except CheckpointDamaged as error:  # on every rank
            if restart is None or (copied := restart.load_stand_in(training, Path(load_dir), error, strict=strict)) is None:
                raise
            loaded = copied
        return self._take(loaded, wanted)

    def _take(self, loaded: Loaded, wanted: Wanted) -> tuple[str, dict[str, Any]]:
        """Note what was loaded, and return its path and its client state."""
        if wanted.everything:
            self._client = loaded.client
            if self._copies is not None:
                self._copies.go_on_from(loaded.step)
        return loaded.path, loaded.client.values

    def _ranks(self) -> Ranks:
        return self._open_writer().ranks

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
