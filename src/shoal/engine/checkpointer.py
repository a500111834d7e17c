"""Saving and loading an engine: its tensors as pieces, its counters as values, its ranks in agreement.

A checkpoint holds everything that the next step depends on. It is written behind training's back: `save_checkpoint`
returns once the state is copied, and a failure surfaces at the next save, in `wait_for_checkpoint`, or in `destroy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from shoal.checkpoint import FILE_BYTES, Ranks, Snapshot, Writer, latest, read, rng, settle
from shoal.engine import full_state_dict
from shoal.engine.accessors import Surface
from shoal.engine.training_state import (
    PUBLISHED,
    moments_to_load,
    moments_to_save,
    parameter_shapes,
    published,
    residual_ranks,
    unsent,
    weights_to_load,
    weights_to_save,
    wire_to_save,
)
from shoal.errors import CheckpointError, RanksDisagree, UsageError
from shoal.log import logger, warn_once
from shoal.optim.masks import MASK
from shoal.schedule.registry import AnySchedule
from shoal.zero.unit import Unit

T = TypeVar("T")

AWAY_BYTES = 128 << 20
"""Bytes of a file, and of memory to stage it in, when the state does not rest in memory."""

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class Checkpointer(Surface):
    """The part of an engine that outlives the process."""

    lr_scheduler: AnySchedule | None
    training_dataloader: Any
    global_steps: int
    global_samples: int
    micro_steps: int
    skipped_steps: int
    _writer: Writer | None = None

    def save_checkpoint(self, save_dir: str | Path, tag: str | int | None = None,
                        client_state: Mapping[str, Any] | None = None, save_latest: bool = True,
                        exclude_frozen_parameters: bool = False) -> bool:
        """Save the whole training state as `save_dir/tag` (default tag: `global_stepN`); every rank calls it.

        `client_state` is any nest of JSON values, tensors and arrays. Returns True once the state is copied, or written
        where `checkpoint.async_save` is false. Raises `CheckpointError` (also for the save before this one), `UsageError`
        for client state that needs pickle, `RanksDisagree` for differing tags where the configuration says so.
        """
        self.refuse_destroyed("save_checkpoint")
        if not str(save_dir):
            raise UsageError("save_checkpoint: save_dir is empty; give a folder that all ranks share")
        assert self.sharded is not None
        if self.optimizer is not None:
            self.optimizer.check_not_begun("save_checkpoint")
        if self.optimizer is not None and self.optimizer.pending:
            warn_once("save_checkpoint: saved within an accumulation; the gradients of its unfinished microbatches are not "
                      "in the checkpoint")
        tag = self._agree_on_tag(tag)
        if self.optimizer is not None:
            self.optimizer.settle()
        self.sharded.settle()
        settings = self.settings.checkpoint
        pieces = list(weights_to_save(self.sharded))
        if exclude_frozen_parameters:
            frozen = {f"weight/{m.name}" for unit in self.sharded.units if not unit.trainable for m in unit.members}
            pieces = [piece for piece in pieces if piece.name not in frozen]
        if self.optimizer is not None:
            pieces += moments_to_save(self.sharded, self.optimizer)
            pieces += wire_to_save(self.sharded)
        away = any(piece.hold is not None for piece in pieces)  # written straight from where it rests, bit by bit
        pending = self._writing().write(
            save_dir, tag, pieces, step=self.global_steps, latest=save_latest, file_bytes=AWAY_BYTES if away else FILE_BYTES,
            keep_last=settings.keep_last, shared=self._shared(client_state or {}, exclude_frozen_parameters),
            private={"random": rng.capture()})
        if away or not settings.async_save:
            pending.wait()
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the last save stands; raises its `CheckpointError` on every rank if it failed."""
        if self._writer is not None:
            self._writer.wait()

    def load_checkpoint(self, load_dir: str | Path, tag: str | int | None = None, load_module_strict: bool = True,
                        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
                        load_module_only: bool = False, custom_load_fn: Any = None,
                        ) -> tuple[str | None, dict[str, Any] | None]:
        """Load `load_dir/tag` (default: what `latest` names), saved at any stage on any number of ranks.

        Returns (path, client_state), or (None, None) with a warning when no tag is given and there is no `latest`.
        `load_module_only` takes the weights alone; with `load_module_strict` false, names that the checkpoint lacks keep
        their values. Raises `CheckpointError` on every rank, before anything is changed where that can be known.
        """
        self.refuse_destroyed("load_checkpoint")
        if custom_load_fn is not None:
            raise UsageError("load_checkpoint: custom_load_fn is not supported: tensors are filled in place by name; "
                             "rename them in the checkpoint, or load with load_module_strict=False")
        assert self.sharded is not None
        if self.optimizer is not None:
            self.optimizer.check_not_begun("load_checkpoint")
        self.wait_for_checkpoint()
        settle()  # another engine of this process may be saving what is to be loaded
        there = self.parameter_groups.world.gather_objects(tag is not None or latest(Path(load_dir)) is not None)
        if not any(there):
            warn_once(f"load_checkpoint: {load_dir} has no file 'latest' and no tag was given; nothing is loaded")
            return None, None
        if not all(there):
            seeing = [rank for rank, found in enumerate(there) if found]
            raise CheckpointError(f"load_checkpoint: only ranks {seeing} see a file 'latest' in {load_dir}; give a folder "
                                  f"that all ranks share")
        self.sharded.settle()
        with read(load_dir, None if tag is None else str(tag), ranks=self._writing().ranks) as snapshot:
            private = self._read_values(snapshot)
            self._check_fit(snapshot, strict=load_module_strict, optimizer=load_optimizer_states and not load_module_only,
                            data=not load_module_only)
            self._load_tensors(snapshot, strict=load_module_strict, moments=load_optimizer_states and not load_module_only)
            if not load_module_only:
                self._load_values(snapshot, private, optimizer=load_optimizer_states, schedule=load_lr_scheduler_states)
            client = cast("dict[str, Any]", snapshot.shared.get("client_state", {}))
            return str(snapshot.path), client

    def consolidated_state_dict(self, dtype: torch.dtype | None = None, *, exclude_frozen: bool = False,
                                ) -> dict[str, Tensor] | None:
        """Gather the model's state dict on rank 0, unit by unit, on the CPU; None on the other ranks. All ranks call it.

        Parameters come in `dtype`, by default their own; torch.float32 gives the masters of a 16-bit training.
        """
        self.refuse_destroyed("consolidated_state_dict")
        assert self.sharded is not None
        return full_state_dict.consolidate(self.sharded, dtype, exclude_frozen=exclude_frozen)

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin",
                         exclude_frozen_parameters: bool = False) -> bool:
        """Save the weights in the compute dtype as one file that `torch.load` reads; every rank calls it.

        At stage 3 it returns False, with a warning, unless `stage3_gather_16bit_weights_on_model_save` is true.
        """
        zero = self.settings.zero_optimization
        if zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
            logger.warning("save_16bit_model: nothing is saved; at stage 3 the weights must be gathered first: set "
                           "zero_optimization.stage3_gather_16bit_weights_on_model_save to true")
            return False
        state = self.consolidated_state_dict(exclude_frozen=exclude_frozen_parameters)
        if state is not None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(save_dir) / save_filename)
        return True

    def _writing(self) -> Writer:
        if self._writer is None:  # every rank comes here at its first save or load
            self._writer = Writer(Ranks.join(self.parameter_groups.world.group))
        return self._writer

    def _agree_on_tag(self, tag: str | int | None) -> str:
        tags = self.parameter_groups.world.gather_objects(f"global_step{self.global_steps}" if tag is None else str(tag))
        if len(set(tags)) > 1:
            said = "; ".join(f"rank {rank}: {said!r}" for rank, said in enumerate(tags))
            match self.settings.checkpoint.tag_validation:
                case "Fail":
                    raise RanksDisagree(f"save_checkpoint: ranks save under different tags ({said}); give all the same")
                case "Warn":
                    warn_once(f"save_checkpoint: ranks save under different tags ({said}); rank 0's is taken")
                case "Ignore":
                    pass
        return tags[0]

    def _shared(self, client_state: Mapping[str, Any], exclude_frozen: bool) -> dict[str, object]:
        assert self.sharded is not None
        optimizer = self.optimizer
        kept = {name for name, p in self.sharded.named().items() if p.requires_grad or not exclude_frozen}
        shapes = {name: shape for name, shape in parameter_shapes(self.sharded).items() if name in kept}
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "parameters": self._of_all_stages(shapes),
            "tied": self._of_all_stages(self.sharded.tied_names()),
            "stage": self.zero_optimization_stage(),
            "mesh": self.mesh.ranks.tolist(),
            "optimizer": None if optimizer is None else type(optimizer.optimizer).__name__,
            "groups": [{key: value for key, value in group.items() if key not in ("params", MASK)}
                       for group in ([] if optimizer is None else optimizer.param_groups)],
            "loss_scale": {} if optimizer is None else optimizer.scaler.state_dict(),
            "residual_scale": 1.0 if optimizer is None else optimizer.scaler.value,
            "lr_scheduler": None if self.lr_scheduler is None else dict(self.lr_scheduler.state_dict()),
            "data": None if self.training_dataloader is None else self.training_dataloader.state_dict(),
            "client_state": dict(client_state),
        }

    def _of_all_stages(self, facts: dict[str, T]) -> dict[str, T]:
        """Return what the stages of the pipeline know together."""
        said = self.parameter_groups.communicator("pipeline").gather_objects(facts)
        return {name: fact for each in said for name, fact in each.items()}

    def _load_tensors(self, snapshot: Snapshot, *, strict: bool, moments: bool) -> None:
        assert self.sharded is not None
        pieces = list(weights_to_load(self.sharded, snapshot, strict=strict))
        if moments and self.optimizer is not None:
            pieces += moments_to_load(self.sharded, self.optimizer, snapshot)
        self.sharded.travel(gradient=False, weights=False, still=False)
        snapshot.fill(pieces)
        held = set(snapshot.names()) if moments else set[str]()
        following = [unit for unit in self.sharded.trainable if unit.state is not None and unit.state.weights is not None
                     and all(f"{PUBLISHED}/{member.name}" in held for member in unit.members)]
        for unit in self.sharded.units:
            if unit not in following:
                unit.round()
        snapshot.fill([piece for unit in following for piece in published(unit, self.sharded.cuts)])
        for unit in self.sharded.units:
            unit.writes.mark(range(len(unit.members)))
            unit.publish()
        self._load_residuals(snapshot if moments else None)

    @torch.no_grad()
    def _load_residuals(self, snapshot: Snapshot | None) -> None:
        """Take over what the ranks that saved had not sent: each of those here what every so-manieth of them had."""
        assert self.sharded is not None
        ranks = {} if snapshot is None else residual_ranks(snapshot)
        units = [unit for unit in self.sharded.trainable if ranks or unit.signed]  # one rank takes it as an addend at once
        found: dict[Unit, Tensor] = {}
        for number in range(max(ranks.values(), default=0)):
            part = {unit: torch.zeros(unit.layout.size, device=self.device) for unit in units
                    if number % unit.communicator.ranks == unit.communicator.rank}
            assert snapshot is not None
            pieces = (piece for unit, values in part.items() for piece in unsent(unit, values, number, self.sharded.cuts))
            snapshot.fill([piece for piece in pieces if number < ranks.get(piece.name.partition("/")[2], 0)])
            for unit, values in part.items():
                found[unit] = found[unit].add_(values) if unit in found else values
        for unit in units:
            assert unit.gradient is not None
            unit.gradient.owe(found.get(unit))

    def _read_values(self, snapshot: Snapshot) -> dict[str, object] | None:
        """Read what is no tensor of the model, so that damage there is told, on every rank, before anything changes."""
        rank, ranks, mesh = self.parameter_groups.world.rank, self._writing().ranks, self.mesh.ranks.tolist()

        def values() -> dict[str, object] | None:
            _ = snapshot.shared
            same = snapshot.ranks == self.parameter_groups.world.ranks and snapshot.shared.get("mesh", mesh) == mesh
            return snapshot.private(rank) if same else None

        with ranks.lock:
            return ranks.run_collectively(f"could not load {snapshot.path}", values)

    def _check_fit(self, snapshot: Snapshot, *, strict: bool, optimizer: bool, data: bool) -> None:
        """Raise `CheckpointError` for what does not belong to this engine, before anything changes."""
        shared = snapshot.shared
        assert self.sharded is not None
        known = self._of_all_stages(parameter_shapes(self.sharded))
        extra = [name for name in cast("dict[str, object]", shared["parameters"]) if name not in known]
        if strict and extra:
            raise CheckpointError(f"{snapshot.path} holds {len(extra)} parameters that this model has not, the first is "
                                  f"'{extra[0]}'; build the same model, or load with load_module_strict=False")
        if optimizer and self.optimizer is not None:
            saved, here = shared.get("optimizer"), type(self.optimizer.optimizer).__name__
            if saved is not None and saved != here and {saved, here} != {"Adam", "AdamW"}:
                raise CheckpointError(f"{snapshot.path} holds the state of {saved}, and this engine steps by {here}; use "
                                      f"the same optimizer, or load with load_optimizer_states=False")
            groups = cast("list[object]", shared["groups"])
            if len(groups) != len(self.optimizer.param_groups):
                raise CheckpointError(f"the checkpoint has {len(groups)} optimizer groups, this engine "
                                      f"{len(self.optimizer.param_groups)}; build the same groups, or load with "
                                      f"load_optimizer_states=False")
        if data and self.training_dataloader is not None and shared["data"] is not None:
            self.training_dataloader.check(shared["data"])

    def _load_values(self, snapshot: Snapshot, private: dict[str, object] | None, *,
                     optimizer: bool, schedule: bool) -> None:
        shared = snapshot.shared
        for name in _COUNTERS:
            setattr(self, name, shared[name])
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()  # a step begins, of this engine's length
        if optimizer and self.optimizer is not None:
            self._load_groups(cast("list[dict[str, Any]]", shared["groups"]))
            self.optimizer.scaler.load_state_dict(cast("dict[str, Any]", shared["loss_scale"]))
            scale = self.optimizer.scaler.value  # which the configuration may have set otherwise than it was
            self.optimizer.rescale(scale / cast("float", shared.get("residual_scale", scale)))
        if schedule and self.lr_scheduler is not None and shared["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(shared["lr_scheduler"])
        if self.training_dataloader is not None and shared["data"] is not None:
            self.training_dataloader.load_state_dict(shared["data"])
        if self.optimizer is not None:
            self.optimizer.route()
        if private is not None:
            rng.restore(cast("dict[str, object]", private["random"]))
        else:
            logger.info("%s was saved by %d ranks and is loaded by %d, or on another mesh: random states are not restored",
                        snapshot.path, snapshot.ranks, self.parameter_groups.world.ranks)

    def _load_groups(self, saved: list[dict[str, Any]]) -> None:
        assert self.optimizer is not None
        for group, options in zip(self.optimizer.param_groups, saved, strict=True):
            group.update(options)
