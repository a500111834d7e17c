"""Putting a snapshot into a training: what it holds is checked on all ranks before anything changes.

A snapshot is a checkpoint on disk, in Shoal's layout or in a published one, or a copy in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from shoal.checkpoint import Piece, Ranks, Snapshot, extra_states, load_extra_states
from shoal.engine.saved_values import CLIENT_STEP, EXTRA, load_values, of_all_stages
from shoal.engine.training_objects import TrainingObjects
from shoal.engine.training_state import (
    PUBLISHED,
    moments_to_load,
    parameter_shapes,
    published_pieces,
    residual_pieces,
    residual_ranks,
    weights_to_load,
)
from shoal.errors import CheckpointDamaged, CheckpointError
from shoal.log import warn_once
from shoal.mesh.parameter_groups import ParameterGroups
from shoal.optim.sharded import ShardedOptimizer
from shoal.zero.sharded import ShardedModel
from shoal.zero.unit import Unit

__all__ = ["ClientState", "Loaded", "StateLoader", "Wanted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The parts of a checkpoint that are loaded."""

    strict: bool
    moments: bool
    optimizer: bool
    schedule: bool
    everything: bool
    """More than the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientState:
    """The state that a script has given to `save_checkpoint`."""

    values: dict[str, Any]
    step: int | None
    """The step that it was saved at; None where none was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The result of a load."""

    path: str
    step: int
    client: ClientState


class StateLoader:
    """Loads snapshots into the training of one engine."""

    def __init__(self, parameter_groups: ParameterGroups, device: torch.device, ranks: Callable[[], Ranks]) -> None:
        """`ranks` returns those that load together; the first call of it is a collective one."""
        self._parameter_groups = parameter_groups
        self._device = device
        self._ranks = ranks

    def load(self, training: TrainingObjects, wanted: Wanted, opened: Snapshot) -> Loaded:
        """Load what is wanted of the snapshot, and close it. A collective call.

        Raises `CheckpointError` on every rank: `CheckpointDamaged` where the snapshot cannot be read.
        """
        training.sharded.finish_pending()
        with opened as snapshot:
            private = self._read_values(snapshot)
            self._check_fit(training, snapshot, strict=wanted.strict, optimizer=wanted.moments, data=wanted.everything)
            self._load_tensors(training, snapshot, strict=wanted.strict, moments=wanted.moments)
            shared = snapshot.shared
            load_extra_states(training.sharded.model, cast("dict[str, Any]", shared.get(EXTRA, {})))
            if wanted.everything:
                load_values(training, snapshot, private, self._parameter_groups.world.ranks, optimizer=wanted.optimizer,
                            schedule=wanted.schedule)
            step = training.progress.global_steps
            return Loaded(path=str(snapshot.path), step=step, client=ClientState(
                values=cast("dict[str, Any]", shared.get("client_state", {})),
                step=cast("int | None", shared.get(CLIENT_STEP, step))))

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

        ranks = self._ranks()
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
        everyone, ranks = self._parameter_groups.world, self._ranks()
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
        known = of_all_stages(self._parameter_groups, parameter_shapes(training.sharded))
        extra = [name for name in cast("dict[str, object]", shared["parameters"]) if name not in known]
        if strict and extra:
            raise CheckpointError(f"{snapshot.path} holds {len(extra)} parameters that this model has not, the first is "
                                  f"'{extra[0]}'; build the same model, or load with load_module_strict=False")
        saved_extra = cast("dict[str, object]", shared.get(EXTRA, {}))
        expected_extra = of_all_stages(self._parameter_groups, extra_states(training.sharded.model))
        lacking = [name for name in expected_extra if name not in saved_extra]
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
