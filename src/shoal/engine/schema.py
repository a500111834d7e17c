"""`Config` is the top level of the configuration; it composes the sections that each package declares.

config = Config.resolve("zero2.json", data_ranks=2, data_ranks_origin="WORLD_SIZE of torchrun")
config.zero_optimization.stage        2
config.batch.accumulation             4
config.origins["zero_optimization.stage"]   "given"
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from shoal.activation.settings import ActivationSettings
from shoal.attention.settings import SparseAttentionSettings
from shoal.checkpoint.settings import CheckpointSettings
from shoal.config.batch import ACCUMULATION, MICRO, TOTAL, BatchSizes, DataRanks, solve
from shoal.config.blocks import BLOCKS, SCALARS
from shoal.config.load import Source, name_of, read
from shoal.config.problem import Problem, raise_all
from shoal.config.published import Published
from shoal.config.resolve import DEFAULT, Findings, leaves, resolve
from shoal.config.section import Conflict, Dtype, Every, Number, Positive, Rewritten, Section, Switch, any_case
from shoal.errors import ConfigError
from shoal.log import warn_once
from shoal.mesh.mesh import MeshSettings
from shoal.nn.settings import KernelSettings
from shoal.optim.settings import OptimizerSettings
from shoal.pipeline.settings import PipelineSettings
from shoal.precision.settings import Bf16Settings, DataTypes, Fp16Settings
from shoal.recording.settings import CommsLoggerSettings
from shoal.resilience.elastic import WorldSizeError, elastic_batch
from shoal.resilience.settings import ElasticitySettings, ResilienceSettings
from shoal.schedule.settings import ScheduleSettings
from shoal.tensor_parallel.settings import TensorParallelSettings
from shoal.tier.settings import AioSettings
from shoal.zero.settings import ZeroSettings

__all__ = ["Config"]

_Level = Annotated[
    Literal["debug", "info", "warning", "error", "critical"],
    BeforeValidator(any_case("debug", "info", "warning", "error", "critical")),
]
_FP32_REDUCTION = ("fp32_allreduce", "allreduce_always_fp32")


class Config(Section):
    """The top level of the JSON. Build it with `Config.resolve`."""

    train_batch_size: Positive | None = None
    """Samples per optimizer step over all data ranks; derived from the next two keys if absent."""

    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples per forward on one rank; derived if absent."""

    gradient_accumulation_steps: Positive | None = None
    """Microbatches per optimizer step; derived if absent."""

    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer by name."""

    scheduler: ScheduleSettings = ScheduleSettings()
    """The learning-rate schedule by name."""

    gradient_clipping: Annotated[Number, Field(ge=0)] = 1.0
    """Maximum global L2 norm of the gradients; larger gradients are scaled down to it; 0 disables clipping."""

    communication_data_type: Dtype | None = None
    """The dtype in which gradients are reduced over ranks; null: the compute dtype."""

    prescale_gradients: Switch | None = None
    """Divide gradients by the number of ranks before the sum (true) or after it (false). null: before in fp32, where it is
    free; in 16 bits after on gloo, which sums in fp32, and before on NCCL. All three work at every stage."""

    gradient_predivide_factor: Annotated[Number, Field(gt=0)] | None = None
    """Divide gradients by this factor before the sum, and by the rest of the mean after it; null: as `prescale_gradients`
    says."""

    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(any_case("mean", "sum"))] = "mean"
    """Use the mean of the data ranks' gradients, or their sum."""

    sparse_gradients: Switch = False
    """For embeddings created with `sparse=True`, exchange only the rows that a step touches."""

    zero_allow_untested_optimizer: Switch = False
    """Allow an optimizer that is not known to be elementwise to step on slices of parameters."""

    zero_optimization: ZeroSettings = ZeroSettings()
    """Sharding of training state over the data ranks."""

    mesh: MeshSettings = MeshSettings()
    """The size of each mesh axis. (Shoal only.)"""

    pipeline: PipelineSettings = PipelineSettings()
    """Pipeline parallelism."""

    tensor_parallel: TensorParallelSettings = TensorParallelSettings()
    """Tensor parallelism."""

    sparse_attention: SparseAttentionSettings = SparseAttentionSettings()
    """Block-sparse attention."""

    kernels: KernelSettings = KernelSettings()
    """Kernels that compute torch's layers. (Shoal only.)"""

    activation_checkpointing: ActivationSettings = ActivationSettings()
    """Memory of activations."""

    fp16: Fp16Settings = Fp16Settings()
    """fp16 training."""

    bf16: Bf16Settings = Bf16Settings()
    """bf16 training."""

    data_types: DataTypes = DataTypes()
    """Dtypes other than the compute dtype."""

    sequence_parallel_size: Positive | None = None
    """Ranks that process parts of the same sequences. The same as `mesh.sequence`."""

    data_parallel_size: Positive | None = None
    """Ranks that see different samples, `mesh.replica` x `mesh.shard`; null: the ranks that the other axes leave."""

    dataloader_drop_last: Switch = False
    """Drop the last batch of an epoch if it is incomplete."""

    aio: AioSettings = AioSettings()
    """Disk I/O of offloaded state."""

    checkpoint: CheckpointSettings = CheckpointSettings()
    """Writing and keeping checkpoints."""

    elasticity: ElasticitySettings = ElasticitySettings()
    """Batch sizes that stay when the number of ranks changes."""

    resilience: ResilienceSettings = ResilienceSettings()
    """Going on after a fault. (Shoal only.)"""

    comms_logger: CommsLoggerSettings = CommsLoggerSettings()
    """The log of collectives."""

    broadcast_buffers: Switch = True
    """After each step give all data ranks rank 0's buffers that have changed, such as the running statistics of BatchNorm,
    as DistributedDataParallel does before a forward; false: each rank keeps its own."""

    steps_per_print: Every = None
    """Interval of progress reports, in steps; null or infinity: never."""

    log_level: _Level | None = None
    """The level of the library's logger; null: set by the application."""

    dump_state: Switch = False
    """Log the resolved configuration once the engine is built."""

    vocabulary_size: Positive | None = None
    """Vocabulary size; a size that is not a multiple of 8 gives a warning, because it is slower on matrix units."""

    timeout: Annotated[Number, Field(gt=0)] = 600.0
    """Seconds that a collective may take before it raises CollectiveTimeout. (Shoal only.)"""

    debug: Switch = False
    """Compare a fingerprint of every collective across ranks before it runs. Slow. (Shoal only.)"""

    direct_bytes: Positive | None = 256 << 10
    """Minimum bytes of a message between ranks of one machine that is read directly from the sender's memory, if the system
    permits it, instead of sent through a socket; null: never. (Shoal only.)"""

    aliases: ClassVar[Mapping[str, str]] = {"bfloat16": "bf16"}
    published: ClassVar[Mapping[str, Published]] = MappingProxyType({**SCALARS, **BLOCKS})

    _batch: BatchSizes | None = PrivateAttr(default=None)
    _origins: dict[str, str] = PrivateAttr(default_factory=dict[str, str])
    _given: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])

    @classmethod
    def resolve(cls, source: Source, *, data_ranks: int | None, data_ranks_origin: str = "the caller") -> Config:
        """Resolve the configuration in `source` (path, mapping or URL-safe base64 JSON) completely.

        `data_ranks` is the number of ranks that see different samples, and error messages name `data_ranks_origin` as its
        source. With None the batch sizes stay as given, for callers that need no batch (`zero.Init`).

        Raises ConfigError with every problem, or NotSupportedYet if every problem is a key of a later version.
        Warns once per key that has no effect.
        """
        given = read(source)
        found = resolve(cls, given)
        config, findings = found.section, found.findings
        if data_ranks is not None:
            config = config._with_batch(DataRanks(count=data_ranks, origin=data_ranks_origin), findings)
        raise_all(findings.problems, name_of(source))
        for warning in findings.warnings:
            warn_once(warning)
        config._warn()
        config._given = given
        config._origins = {path: findings.origins.get(path, DEFAULT) for path, _ in leaves(config.as_dict())}
        return config

    @property
    def batch(self) -> BatchSizes:
        """The resolved batch sizes, for a configuration that was resolved for a number of data ranks."""
        assert self._batch is not None, "resolved without a number of data ranks"
        return self._batch

    @property
    def given(self) -> dict[str, Any]:
        """The keys and values of `source`, before any was resolved."""
        return self._given

    @property
    def origins(self) -> Mapping[str, str]:
        """The origin of each value, by path: given (under which key), default, auto, or derived (from which values)."""
        return MappingProxyType(self._origins)

    @property
    def compute_dtype(self) -> Literal["fp16", "bf16", "fp32"]:
        """The dtype of weights and activations."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    def as_dict(self) -> dict[str, Any]:
        """Return every setting as plain JSON values; resolving it again gives the same configuration."""
        return self.model_dump()

    @classmethod
    def rewrite(cls, given: dict[str, object]) -> Rewritten:
        values, origins, conflicts = dict(given), dict[str, str](), list[Conflict]()
        if isinstance(values.get("zero_optimization"), bool):
            _rewrite_oldest_zero(values, origins)
        for old in _FP32_REDUCTION:
            if values.get(old) is True:
                del values[old]
                if "communication_data_type" in given:
                    keys = (old, "communication_data_type")
                    message = "an old form of communication_data_type, which stands beside it; remove the old form"
                    conflicts.append(Conflict(keys=keys, message=message))
                values.setdefault("communication_data_type", "fp32")
                origins["communication_data_type"] = f"given as '{old}'"
        return Rewritten(values=values, origins=origins, conflicts=tuple(conflicts))

    def conflicts(self) -> Iterable[Conflict]:
        if self.fp16.enabled and self.bf16.enabled:
            yield Conflict(keys=("fp16.enabled", "bf16.enabled"), message="got true beside bf16.enabled; choose one")
        yield from self._conflicts_of_step_in_backward()
        yield from self._conflicts_of_head_layouts()
        if self.prescale_gradients and self.gradient_predivide_factor not in (None, 1):
            yield Conflict(keys=("prescale_gradients", "gradient_predivide_factor"),
                           message="got true beside gradient_predivide_factor: the whole division is before the sum, or a "
                                   "part of it; remove one of them")
        if self.prescale_gradients and self.gradient_allreduce_op == "sum":
            yield Conflict(keys=("prescale_gradients", "gradient_allreduce_op"),
                           message="got true beside gradient_allreduce_op \"sum\", which divides by nothing; remove one of "
                                   "them, or give gradient_predivide_factor against overflow")
        accumulate = self.data_types.grad_accum_dtype
        if accumulate not in (None, "fp32", self.compute_dtype):
            choices = "'fp32'" if self.compute_dtype == "fp32" else f"'fp32' or '{self.compute_dtype}'"
            yield Conflict(
                keys=("data_types.grad_accum_dtype", "fp16.enabled", "bf16.enabled"),
                message=f"got '{accumulate}' beside {self.compute_dtype} gradients; choose {choices}",
            )

    def _conflicts_of_head_layouts(self) -> Iterable[Conflict]:
        """Yield the axis whose ranks have some of the heads, where layouts differ by head."""
        if self.sparse_attention.mode is None or not self.sparse_attention.different_layout_per_head:
            return
        for key, ranks in (("tensor_parallel.autotp_size", self.tensor_parallel.size or 1),
                           ("mesh.tensor", self.mesh.tensor or 1)):
            if ranks > 1:
                yield Conflict(keys=("sparse_attention.different_layout_per_head", key),
                               message=f"got true beside {key}: a rank has some of the heads, and would give them the "
                                       f"layouts of the first ones; set it to false")

    def _conflicts_of_step_in_backward(self) -> Iterable[Conflict]:
        """Yield each key whose decision needs all gradients: backward has stepped some units before they are there."""
        if not self.zero_optimization.offload_optimizer.step_in_backward:
            return
        for enabled, key, known, fix in (
                (self.gradient_clipping > 0, "gradient_clipping", "the norm of all gradients is known", "set it to 0"),
                (self.fp16.enabled, "fp16.enabled", "an overflow anywhere is known", "use bf16"),
                (self.communication_data_type == "fp16" and not self.fp16.enabled, "communication_data_type",
                 "an overflow on the wire is known", "choose another than fp16"),
                (self.bf16.enabled and self.bf16.check_grad_overflow, "bf16.check_grad_overflow",
                 "an overflow anywhere is known", "set it to false"),
                (self.resilience.guard.enabled, "resilience.guard.enabled", "the norm of all gradients is known",
                 "set it to false"),
                (not self.zero_optimization.ignore_unused_parameters, "zero_optimization.ignore_unused_parameters",
                 "an unused parameter is known", "set it to true")):
            if enabled:
                yield Conflict(keys=("zero_optimization.offload_optimizer.step_in_backward", key),
                               message=f"got true beside {key}: {known} only after backward; {fix}, or leave the step to "
                                       f"engine.step()")

    def _with_batch(self, ranks: DataRanks, findings: Findings) -> Config:
        if any(findings.rejected(key) for key in (TOTAL, MICRO, ACCUMULATION, "elasticity")):
            return self
        if self.elasticity.enabled:
            return self._with_elastic_batch(ranks, findings)
        given = {TOTAL: self.train_batch_size, MICRO: self.train_micro_batch_size_per_gpu}
        given[ACCUMULATION] = self.gradient_accumulation_steps
        try:
            sizes = solve(given[TOTAL], given[MICRO], given[ACCUMULATION], ranks)
        except ConfigError as error:
            path, _, message = str(error).partition(": ")
            findings.problems.append(Problem(path=path, message=message))
            return self
        settled = {TOTAL: sizes.total, MICRO: sizes.micro, ACCUMULATION: sizes.accumulation}
        for key, size in given.items():
            if size is None:
                findings.origins[key] = _derivation(key, settled, given, ranks)
        config = self.model_copy(update=settled)
        config._batch = sizes
        return config

    def _with_elastic_batch(self, ranks: DataRanks, findings: Findings) -> Config:
        """Return this configuration with the batch sizes that `elasticity` gives for `ranks`."""
        try:
            batch = elastic_batch(self.elasticity, ranks.count)
        except ConfigError as error:
            path, _, message = str(error).partition(": ")
            findings.problems.append(Problem(path=path, message=f"{message} (data ranks: {ranks.origin})",
                                             kind=type(error)))
            return self
        if batch.micro is None:
            message = (f"none of them divides the {batch.total // ranks.count} samples that each of {ranks} has of a "
                       f"batch of {batch.total}; add one that does")
            findings.problems.append(Problem(path="elasticity.micro_batch_sizes", message=message,
                                             kind=WorldSizeError))
            return self
        accumulation = batch.total // (batch.micro * ranks.count)
        settled = {TOTAL: batch.total, MICRO: batch.micro, ACCUMULATION: accumulation}
        given = {TOTAL: self.train_batch_size, MICRO: self.train_micro_batch_size_per_gpu,
                 ACCUMULATION: self.gradient_accumulation_steps}
        for key, size in given.items():
            if size not in (None, settled[key]) and not self.elasticity.ignore_non_elastic_batch_info:
                message = (f"got {size}, and elasticity gives {settled[key]} for {ranks}; remove it, or set "
                           f"elasticity.ignore_non_elastic_batch_info to true")
                findings.problems.append(Problem(path=key, message=message))
            findings.origins[key] = f"derived (elasticity, {ranks})"
        config = self.model_copy(update=settled)
        config._batch = BatchSizes(micro=batch.micro, accumulation=accumulation, data_ranks=ranks.count)
        return config

    def _warn(self) -> None:
        if self.vocabulary_size is not None and self.vocabulary_size % 8:
            padded = math.ceil(self.vocabulary_size / 8) * 8
            warn_once(f"vocabulary_size: got {self.vocabulary_size}, no multiple of 8; pad it to {padded} for speed")


def _rewrite_oldest_zero(values: dict[str, object], origins: dict[str, str]) -> None:
    """Put `"zero_optimization": true` (stage 1) and the `allgather_size` beside it into today's form."""
    switched_on = values["zero_optimization"] is True
    block: dict[str, object] = {"stage": 1 if switched_on else 0}
    origins["zero_optimization.stage"] = f"given as 'zero_optimization': {str(switched_on).lower()}"
    if "allgather_size" in values:
        block["allgather_bucket_size"] = values.pop("allgather_size")
        origins["zero_optimization.allgather_bucket_size"] = "given as 'allgather_size'"
    values["zero_optimization"] = block


def _derivation(key: str, settled: Mapping[str, int], given: Mapping[str, int | None], ranks: DataRanks) -> str:
    if key == TOTAL:
        return f"derived ({settled[MICRO]} x {settled[ACCUMULATION]} x {ranks})"
    if key == ACCUMULATION and (given[TOTAL] is None or given[MICRO] is None):
        return "derived (nothing asks for more than one)"
    other = MICRO if key == ACCUMULATION else ACCUMULATION
    return f"derived ({settled[TOTAL]} / ({settled[other]} x {ranks}))"
