"""Shoal as a strategy of Lightning, for people who choose it by name; CPUs and GPUs, nothing else to install.

    Trainer(strategy=ShoalStrategy(stage=3), accelerator="cpu", devices=2)
    Trainer(strategy="shoal_stage_2")                       after `import shoal.compat.lightning`

The engine owns backward, clipping and the step; Lightning owns the loop, the accumulation, the schedule and the hooks: it
divides the loss, and says which microbatch ends a step. A checkpoint is a folder, which any number of devices at any stage
can load.
"""
# Lightning is no dependency of Shoal: where it is missing its types are unknown.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType

import shoal
from shoal.config.load import read
from shoal.engine.engine import Engine
from shoal.errors import CheckpointError, UsageError
from shoal.tree import tree_map

__all__ = ["ShoalPrecision", "ShoalStrategy"]

SECTIONS: Mapping[str, dict[str, Any]] = {
    "32-true": {}, "bf16-true": {"bf16": {"enabled": True}}, "bf16-mixed": {"bf16": {"enabled": True}},
    "16-true": {"fp16": {"enabled": True}}, "16-mixed": {"fp16": {"enabled": True}}}
"""The configuration of each precision of Lightning's; masters are fp32 in all of them."""

TAG = "checkpoint"
MOVED = ("state_dict", "optimizer_states")
"""Entries of Lightning's checkpoint that the engine saves itself."""


class ShoalPrecision(Precision):
    """Passes backward and the step to the engine, and casts the inputs."""

    def __init__(self, precision: str):
        if precision not in SECTIONS:
            raise UsageError(f"ShoalStrategy: precision: got {precision!r}; choose one of {', '.join(SECTIONS)}")
        self.precision: Any = precision
        self._dtype = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}[precision.split("-")[0]]
        self._engine_clips_at = 0.0

    def leave_clipping_to_engine(self, norm: float) -> None:
        """Note that the engine's step clips the gradients at this global norm; 0: it does not."""
        self._engine_clips_at = norm

    def convert_input(self, data: Any) -> Any:
        """Cast the floating-point tensors of a batch to the dtype of the weights."""
        return tree_map(lambda tensor: tensor.to(self._dtype) if tensor.is_floating_point() else tensor, data)

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run the engine's backward, which scales the loss; Lightning has divided it by the accumulation."""
        model.trainer.strategy.engine.backward(tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run `closure`, which computes and calls backward; then step."""
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            raise UsageError("training_step returned None: every rank takes part in each backward; return a loss, or a loss "
                             "times 0 to skip a batch")
        if not model.trainer.fit_loop._skip_backward:  # weight averaging runs an epoch of forwards for BatchNorm
            model.trainer.strategy.engine.step()
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float | None = 0.0,
                       gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM) -> None:
        """Clip by value, or at another norm than the engine's step does: at stages 0 to 2, where gradients can be read.

        Scripts clip so in manual optimization, or in `configure_gradient_clipping`. Stage 3 raises `UsageError`.
        """
        by_engine = gradient_clip_algorithm == GradClipAlgorithmType.NORM and clip_val == self._engine_clips_at
        if clip_val and not by_engine:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)


class ShoalStrategy(DDPStrategy):
    """Train by Shoal at a ZeRO `stage`; `offload` keeps masters and moments on the host.

    `config` holds further sections of Shoal's configuration, as a dict or a path. Batch sizes, accumulation and precision
    are the Trainer's own, and so is clipping where it is given there. Modules that are built in `configure_model` are built
    sharded at stage 3.
    """

    strategy_name = "shoal"

    def __init__(self, stage: int = 2, offload: bool = False, config: Mapping[str, Any] | str | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        given: dict[str, Any] = {} if config is None else dict(read(config))
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu" if offload else "none"}}
        self._sections: dict[str, Any] = {"checkpoint": {"async_save": False}, **given,
                                          "zero_optimization": {**zero, **given.get("zero_optimization", {})}}
        self.engine: Engine | None = None

    @property
    def precision_plugin(self) -> ShoalPrecision:
        """The plugin that passes backward and steps to the engine."""
        found = self._precision_plugin
        return found if isinstance(found, ShoalPrecision) else ShoalPrecision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        if precision_plugin is not None and not isinstance(precision_plugin, ShoalPrecision):
            precision_plugin = ShoalPrecision(str(precision_plugin.precision))
        self._precision_plugin = precision_plugin

    # Building

    def setup(self, trainer: Any) -> None:
        """Build the engine over the module: with the optimizer of `configure_optimizers` where the Trainer fits."""
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.engine is not None and not self.engine.destroyed:
            if not fitting and self.engine.module is self.lightning_module:
                return
            self.engine.destroy()
        optimizer = None
        if fitting:
            optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(self.lightning_module)
            if len(optimizers) != 1:
                raise UsageError(f"configure_optimizers returned {len(optimizers)} optimizers; ShoalStrategy steps one: "
                                 f"give it several parameter groups, or train the other module in a Trainer of its own")
            optimizer = optimizers[0]
        engine = shoal.initialize(model=self.lightning_module, optimizer=optimizer, config=self._configuration(trainer))[0]
        self.engine = self.model = engine
        self.optimizers = [] if optimizer is None else [optimizer]
        self.setup_precision_plugin()
        self.precision_plugin.leave_clipping_to_engine(engine.gradient_clipping())
        self.barrier()

    def _configuration(self, trainer: Any) -> dict[str, Any]:
        """Return the configuration: the strategy's sections, and what the Trainer was given."""
        norm = trainer.gradient_clip_val
        if norm is None:
            norm = self._sections.get("gradient_clipping", 0.0)
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            if self._sections["zero_optimization"]["stage"] == 3:
                raise UsageError("gradient_clip_algorithm: got 'value'; stage 3 clips by the global norm: choose 'norm', or "
                                 "a stage from 0 to 2")
            norm = 0.0
        return {"train_micro_batch_size_per_gpu": 1, **self._sections, **SECTIONS[str(self.precision_plugin.precision)],
                "gradient_accumulation_steps": 1,  # Lightning calls the step where an accumulation ends
                "gradient_clipping": float(norm)}

    @contextmanager
    def model_sharded_context(self) -> Generator[None]:
        """Build the modules of `configure_model` sharded at stage 3."""
        enabled = self._sections["zero_optimization"]["stage"] == 3
        with shoal.zero.Init(config=self._sections, enabled=enabled):
            yield

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Run a microbatch that does not end a step: stages 0 and 1 reduce nothing in it."""
        assert self.engine is not None
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
            self.engine.step()  # counts the microbatch
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the engine loads its checkpoint."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the engine restores the optimizer."""
        return False

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the engine saves the state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the engine's state as the folder `filepath`, with the rest of Lightning's checkpoint in it."""
        assert self.engine is not None
        if storage_options is not None:
            raise UsageError("save_checkpoint: storage_options are not supported: the engine writes the files; give a "
                             "folder that every rank sees")
        rest = {key: value for key, value in checkpoint.items() if key not in MOVED}
        self.engine.save_checkpoint(self.broadcast(filepath), tag=TAG, client_state=rest)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder that `save_checkpoint` wrote, on any number of ranks; with the optimizer's state to fit."""
        assert self.engine is not None and self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        path, state = self.engine.load_checkpoint(
            checkpoint_path, TAG, load_module_strict=self.lightning_module.strict_loading, load_optimizer_states=fitting,
            load_lr_scheduler_states=False, load_module_only=not fitting)
        if path is None or state is None:
            raise CheckpointError(f"{checkpoint_path}: holds no checkpoint of ShoalStrategy; give the folder that "
                                  f"ModelCheckpoint wrote")
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: the engine has loaded the weights."""

    # The end

    def teardown(self) -> None:
        """Keep the engine, for `save_checkpoint`, `validate` and `predict`; the next `fit` builds another.

        `strategy.engine.destroy()` leaves the module whole and plain.
        """
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register `shoal` (stage 2) and `shoal_stage_0` to `shoal_stage_3`, each with `_offload` too."""
        strategy_registry.register(cls.strategy_name, cls, description="Shoal at ZeRO stage 2")
        for stage in range(4):
            for offload in (False, True):
                strategy_registry.register(f"shoal_stage_{stage}{'_offload' if offload else ''}", cls, stage=stage,
                                           offload=offload, description=f"Shoal at ZeRO stage {stage}")


ShoalStrategy.register_strategies(StrategyRegistry)
