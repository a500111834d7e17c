"""A seed gives one composition of features: the same one wherever it is drawn, so that the seed reproduces a failure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from random import Random
from typing import Any

STAGES_PER_RANK = {"gpipe": (1,), "1f1b": (1,), "zb-h1": (1,), "zb-h2": (1,), "zbv": (2,), "interleaved": (2, 3)}
"""The pipeline schedules, and how many stages a rank may have with each."""

OPTIMIZERS: dict[str, tuple[dict[str, Any], ...]] = {
    "AdamW": ({"lr": 0.02, "eps": 1e-2, "weight_decay": 0.1},
              {"lr": 0.02, "eps": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.0}),
    "Adam": ({"lr": 0.02, "eps": 1e-2, "weight_decay": 0.01},),
    "SGD": ({"lr": 0.2, "weight_decay": 0.01}, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": ({"lr": 0.02, "eps": 1e-2},),
    "RMSprop": ({"lr": 0.01, "eps": 1e-2, "momentum": 0.5},),
}
"""Classes of torch.optim and their arguments. A large eps makes a step a smooth function of the gradient: with a small one
an element whose gradient is rounding error alone moves by the learning rate, this way or that."""

OWN_OPTIMIZERS: dict[str, tuple[dict[str, Any], ...]] = {
    "Lion": ({"lr": 0.003, "betas": (0.9, 0.99), "weight_decay": 0.1},),
    "Lamb": ({"lr": 0.02, "eps": 1e-2, "weight_decay": 0.1}, {"lr": 0.02, "eps": 1e-2, "bias_correction": False}),
    "OneBitAdam": ({"lr": 0.02, "eps": 1e-2, "weight_decay": 0.1, "freeze_step": 100},),
    "ZeroOneAdam": ({"lr": 0.02, "eps": 1e-2, "var_freeze_step": 100, "var_update_scaler": 100},),
    "OneBitLamb": ({"lr": 0.02, "eps": 1e-2, "freeze_step": 100},),
}
"""Optimizers of shoal.optim and their arguments. Those of `COMPRESSED` stay within their warm-up, which plain PyTorch trains
alike, or have one rank for each parameter."""
COMPRESSED = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
PAST_WARM_UP: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 1, "variance_floor": 0.0}, "OneBitLamb": {"freeze_step": 1, "variance_floor": 0.0},
    "ZeroOneAdam": {"var_update_scaler": 1, "variance_floor": 0.0}}
"""Arguments of `COMPRESSED` without a floor of the variance, which is one of blocks of a rank's flat buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDraw:
    """One layer between the embedding and the head."""

    kind: str
    """A key of `model.KINDS`."""
    hidden: int = 0
    heads: int = 0
    """Of attention, which divide `hidden`."""
    key: str | None = None
    """Layers of one key share the weights `shared`."""
    shared: tuple[str, ...] = ()
    cut: bool = False
    """Tensor ranks cut it."""
    frozen: bool = False
    spare: bool = False
    """It has a parameter that no forward uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDraw:
    """A language model: an embedding, layers, and a head."""

    words: int
    width: int
    layers: tuple[LayerDraw, ...]
    tied: bool
    """The head's matrix is the embedding's."""
    rows: bool
    """The gradient of the embedding is rows."""
    frozen: bool
    """The embedding is not trained."""
    seed: int

    @property
    def depth(self) -> int:
        """The number of layers, with the embedding and the head."""
        return len(self.layers) + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDraw:
    """A topology, and the settings of a training on it."""

    pipeline: int
    sequence: int
    tensor: int
    data: int
    replica: int
    schedule: str | None
    """Of a PipelineModule; None: the model is one module."""
    stages_per_rank: int
    boundaries: tuple[int, ...] | str
    dtype: str
    accumulation: int
    recompute: int
    """Layers that are recomputed together in backward; 0: none."""
    reentrant: bool
    sharded_build: bool
    """The model is built within zero.Init."""
    in_backward: bool = False
    """Backward steps each unit as soon as its gradient is reduced."""
    zero: tuple[tuple[str, Any], ...]
    """The section zero_optimization."""
    tiers: tuple[tuple[str, str], ...]
    """The device of offload_optimizer and of offload_param, where they are given."""
    settings: tuple[tuple[str, Any], ...]
    """Other keys of the configuration."""

    @property
    def ranks(self) -> int:
        return self.pipeline * self.sequence * self.tensor * self.data

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on all data ranks."""
        return self.accumulation * self.data

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in (
            ("pipeline", self.pipeline), ("sequence", self.sequence), ("tensor", self.tensor), ("data", self.data))
            if size > 1) or "1 rank"
        words = [axes, self.dtype, f"ZeRO {dict(self.zero)['stage']}", f"{self.accumulation} microbatches"]
        words += [f"{self.schedule} ({self.stages_per_rank})"] if self.schedule else []
        words += [f"replicas {self.replica}"] if self.replica > 1 else []
        words += [f"recompute {self.recompute}"] if self.recompute else []
        words += ["zero.Init"] if self.sharded_build else []
        words += ["steps in backward"] if self.in_backward else []
        words += [f"{section.partition('_')[2]} on {device}" for section, device in self.tiers]
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """A model, an optimizer, and two topologies: it is trained on the first, saved, and loaded and trained on the second."""

    seed: int
    model: ModelDraw
    first: JobDraw
    second: JobDraw
    optimizer: str
    arguments: dict[str, Any]
    given: str
    """How initialize gets the optimizer: "name", "function" or "instance"."""
    groups: bool
    """Vectors are in a group of their own, without weight decay."""
    clipping: float
    decay: float | None
    """The learning rate's factor after each step."""
    steps: int = 2
    """Steps on each topology."""
    micro: int = 2
    """Samples of a microbatch."""

    def __str__(self) -> str:
        model = self.model
        ties = [layer.key for layer in model.layers if layer.key]
        words = [f"{model.depth} layers", self.optimizer, f"clipping {self.clipping:g}"]
        words += [f"tied {' '.join([*ties, *(['words'] if model.tied else [])])}"] if ties or model.tied else []
        words += ["rows"] if model.rows else []
        return f"{', '.join(words)}; {self.first} -> {self.second}"


def draw(seed: int) -> Composition:
    """Return the composition of a seed."""
    random = Random(seed)
    shapes = [_shape(random), _shape(random)]
    clipping = random.choice((0.0, 0.0, 0.3, 1.0))
    model = _model(random, shapes)
    dtypes = random.choices(("fp32", "bf16", "fp16"), weights=(60, 37, 3), k=1) * 2
    if random.random() < 0.15:
        dtypes = random.sample(["fp32", "bf16"], 2)
    first, second = (_job(random, shape, model, dtype, clipping) for shape, dtype in zip(shapes, dtypes, strict=True))
    optimizer = random.choice(("AdamW", "AdamW", *OPTIMIZERS))
    drawn = Composition(
        seed=seed, model=model, first=first, second=second, optimizer=optimizer,
        arguments=dict(random.choice(OPTIMIZERS[optimizer])), given=random.choice(("name", "name", "function", "instance")),
        groups=random.random() < 0.4, clipping=clipping, decay=random.choice((None, None, 0.7)))
    if random.random() < 0.3:
        drawn = _with_own_optimizer(random, drawn)
    return replace(drawn, first=_in_backward(random, drawn, drawn.first), second=_in_backward(random, drawn, drawn.second))


def _with_own_optimizer(random: Random, drawn: Composition) -> Composition:
    """Return the composition with an optimizer of shoal.optim, and without what it refuses."""
    name = random.choice([*OWN_OPTIMIZERS])
    drawn = replace(drawn, optimizer=name, arguments=dict(random.choice(OWN_OPTIMIZERS[name])))
    if name not in COMPRESSED:
        return drawn
    first, second = (replace(
        job, replica=1, tiers=(), zero=tuple((key, min(value, 2) if key == "stage" else value) for key, value in job.zero),
        settings=tuple(each for each in job.settings if each[0] != "sparse_gradients"))
        for job in (drawn.first, drawn.second))
    if all(job.data * job.sequence * job.tensor == 1 for job in (first, second)):
        drawn = replace(drawn, arguments=drawn.arguments | PAST_WARM_UP[name])
    named = drawn.given == "function" or max(first.pipeline, second.pipeline) > 1  # a stage without weights has no instance
    return replace(drawn, first=first, second=second, given="name" if named else drawn.given)


def _in_backward(random: Random, drawn: Composition, job: JobDraw) -> JobDraw:
    """Return the job, in some draws with steps in backward, where nothing about a step depends on all gradients."""
    allowed = (drawn.clipping == 0 and job.schedule is None and job.dtype != "fp16" and not job.reentrant
               and drawn.optimizer not in (*COMPRESSED, "Lamb"))
    return replace(job, in_backward=random.random() < 0.6 and allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The axes of a topology, and the stages of a pipeline on it."""

    pipeline: int
    sequence: int
    tensor: int
    data: int
    schedule: str | None
    stages_per_rank: int

    @property
    def stages(self) -> int:
        return self.pipeline * self.stages_per_rank


def _shape(random: Random) -> _Shape:
    ranks = random.choices((1, 2, 3, 4), weights=(1, 4, 2, 4), k=1)[0]
    pipeline = random.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
    tensor = random.choice([size for size in (1, 2, 3) if ranks // pipeline % size == 0])
    sequence = random.choice([size for size in range(1, ranks + 1) if ranks // pipeline // tensor % size == 0])
    schedule = random.choice([*STAGES_PER_RANK]) if pipeline > 1 or random.random() < 0.3 else None
    return _Shape(pipeline=pipeline, sequence=sequence, tensor=tensor, data=ranks // pipeline // tensor // sequence,
                  schedule=schedule, stages_per_rank=random.choice(STAGES_PER_RANK[schedule]) if schedule else 1)


def _model(random: Random, shapes: list[_Shape]) -> ModelDraw:
    cuts = lcm(*(shape.tensor for shape in shapes))
    width = random.randint(5, 13)
    depth = max(3, *(shape.stages for shape in shapes)) + random.randint(0, 3)
    tied = random.random() < 0.5
    keyed: dict[str, LayerDraw] = {}

    def layer() -> LayerDraw:
        kind = random.choices(("block", "mix", "gain", "attend"), weights=(4, 3, 1, 4), k=1)[0]
        key = f"{kind} {random.choice('ab')}" if kind != "gain" and random.random() < 0.45 else None
        if key in keyed:
            return keyed[key]
        heads = cuts * random.randint(1, 2) if kind == "attend" else 0
        hidden = (heads or cuts) * random.randint(2, 9)
        names = {"block": ("up.weight", "down.weight"), "mix": ("mix.weight", "mix.bias"), "gain": (),
                 "attend": ("query.weight", "out.weight")}[kind]
        shared = names if random.random() < 0.3 else names[:1]
        cut = cuts > 1 and (kind in ("block", "attend") or (kind == "mix" and width % cuts == 0 and random.random() < 0.5))
        drawn = LayerDraw(kind=kind, hidden=hidden, heads=heads, key=key, shared=shared if key else (), cut=cut,
                          frozen=key is None and random.random() < 0.1, spare=key is None and random.random() < 0.1)
        if key is not None:
            keyed[key] = drawn
        return drawn

    rows, frozen = not tied and random.random() < 0.25, not tied and random.random() < 0.08
    return ModelDraw(words=random.randint(11, 23), width=width, layers=tuple(layer() for _ in range(depth - 2)), tied=tied,
                     rows=rows and not frozen, frozen=frozen, seed=random.randint(0, 10_000))


def _job(random: Random, shape: _Shape, model: ModelDraw, dtype: str, clipping: float) -> JobDraw:
    stage = random.randint(0, 3)
    boundaries: tuple[int, ...] | str = random.choice(("uniform", "parameters"))
    if random.random() < 0.5:
        boundaries = (0, *sorted(random.sample(range(1, model.depth), shape.stages - 1)), model.depth)
    alone = shape.schedule is None
    return JobDraw(
        pipeline=shape.pipeline, sequence=shape.sequence, tensor=shape.tensor, data=shape.data,
        replica=2 if shape.data % 2 == 0 and random.random() < 0.3 else 1,
        schedule=shape.schedule, stages_per_rank=shape.stages_per_rank, boundaries=boundaries, dtype=dtype,
        accumulation=random.randint(1, 5), recompute=random.choice((0, 0, 1, 2, 3)),
        reentrant=alone and not model.frozen and random.random() < 0.3,
        sharded_build=alone and shape.tensor == 1 and random.random() < 0.2,
        zero=(("stage", stage), *_zero_keys(random)), tiers=_tiers(random), settings=_other_keys(random, model))


def _zero_keys(random: Random) -> tuple[tuple[str, Any], ...]:
    keys = {"overlap_comm": (True, False), "reduce_bucket_size": (100, 1000), "allgather_bucket_size": (100, 1000),
            "stage3_prefetch_bucket_size": (0, 100, 10_000), "stage3_param_persistence_threshold": (0, 20, 100),
            "stage3_max_live_parameters": (0, 500), "stage3_max_reuse_distance": (0, 1000, 10**9),
            "sub_group_size": (64, 1000)}
    return tuple((key, random.choice(values)) for key, values in keys.items() if random.random() < 0.25)


def _tiers(random: Random) -> tuple[tuple[str, str], ...]:
    return tuple((section, random.choice(("cpu", "nvme"))) for section in ("offload_optimizer", "offload_param")
                 if random.random() < 0.25)


def _other_keys(random: Random, model: ModelDraw) -> tuple[tuple[str, Any], ...]:
    keys = {"direct_bytes": (None, 1), "prescale_gradients": (True, False), "debug": (True,)}
    found = {key: random.choice(values) for key, values in keys.items() if random.random() < 0.2}
    return (*found.items(), ("sparse_gradients", True)) if model.rows and random.random() < 0.7 else tuple(found.items())
