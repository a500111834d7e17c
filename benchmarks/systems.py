"""The systems that are compared, each at the best settings that were found for it, all doing the same training.

A system turns a model into a step: `step(inputs, targets) -> loss`. fp32, AdamW with one set of hyperparameters and one
parameter group, no gradient clipping for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ddp_hooks import adamw
from torch import Tensor, nn
from workloads import Workload

Step = Callable[[Tensor, Tensor], Tensor]
Build = Callable[[nn.Module, Workload], Step]
Hook = Callable[[nn.parallel.DistributedDataParallel], None]
"""Registers a communication hook."""

BETAS = (0.9, 0.95)
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One competitor: how to make its step, what it needs, and what to call it."""

    title: str
    settings: str
    build: Build
    peer: bool = False
    ratio: float = 1.0
    """Bytes a step must send at least, in units of 2 Psi (N-1)/N in fp32; of a compressing one, of the signs of as many."""
    whole: bool = False
    """Every rank takes part in every sequence: a step is given the batch of all ranks, not the rank's own."""
    stage: int = 0
    """Of ZeRO, where that is asked about."""
    family: str = ""
    """The peer of which this is one setting: tuning.py finds the best of each."""
    rank: int = 0
    """Of the matrices that PowerSGD sends; 0 for others."""
    warm_up: str = ""
    """The system that trains as this one did while it warmed up. Those that have one compress, and their warm-up is over
    before anything is counted."""
    period: int = 1
    """Steps after which what they send begins anew: whole periods are counted, of which a step is the mean."""


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer | Both, workload: Workload) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = workload.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def plain(model: nn.Module, workload: Workload) -> Step:
    """Build the step of one process alone: no communication."""
    return _plain_step(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), workload)


def plain_shard(model: nn.Module, workload: Workload) -> Step:
    """Build the step of a rank of ZeRO without its communication: forward and backward of the whole model, AdamW of 1/N.

    A bound: no system of N ranks that does this computation takes less time. The first 1/N of each parameter is trained.
    """
    ranks = dist.get_world_size()
    parameters = list(model.parameters())
    shards = [nn.Parameter(p.detach().view(-1)[:-(-p.numel() // ranks)]) for p in parameters]
    optimizer = torch.optim.AdamW(shards, fused=True, **ADAMW)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = workload.loss(model(inputs), targets)
        loss.backward()
        for parameter, shard in zip(parameters, shards, strict=True):
            assert parameter.grad is not None
            shard.grad = parameter.grad.view(-1)[:shard.numel()]
        optimizer.step()
        model.zero_grad(set_to_none=True)
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def ddp(bucket: float | None = None, *, static: bool = True, hook: Hook | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = adamw) -> Build:
    """Return the builder of DDP: gradients are views of its buckets, of `bucket` MB (its default: 25, the first of 1).

    `static` is its static_graph. `hook` registers a communication hook on it; `optimizer` makes its optimizer.
    """
    def build(model: nn.Module, workload: Workload) -> Step:
        wrapped = _ddp(model, bucket, static=static)
        if hook is not None:
            hook(wrapped)
        return _plain_step(wrapped, optimizer(wrapped.parameters(), **ADAMW), workload)

    return build


def zero_redundancy(model: nn.Module, workload: Workload) -> Step:
    """Build DDP with torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = _ddp(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True,
                                        fused=True, **ADAMW)
    return _plain_step(wrapped, optimizer, workload)


def _ddp(model: nn.Module, bucket: float | None = None, *, static: bool = True) -> nn.parallel.DistributedDataParallel:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=static,
                                               bucket_cap_mb=bucket)


def ddp_lookups(optimizer: str) -> Build:
    """Return the builder of DDP for a model that looks words up, whose embeddings have sparse gradients.

    Torch's own optimizers of sparse gradients: Adagrad, or SparseAdam for embeddings beside Adam, which leaves the moments
    of rows without a gradient as they are.
    """
    def build(model: nn.Module, workload: Workload) -> Step:
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        for table in tables:
            table.sparse = True
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=False)
        if optimizer == "Adagrad":
            return _plain_step(wrapped, torch.optim.Adagrad(wrapped.parameters(), lr=1e-3), workload)
        sparse = {id(table.weight) for table in tables}
        ours = torch.optim.SparseAdam([table.weight for table in tables], lr=1e-3)
        rest = torch.optim.Adam([weight for weight in wrapped.parameters() if id(weight) not in sparse], lr=1e-3, fused=True)
        return _plain_step(wrapped, Both(ours, rest), workload)

    return build


class Both:
    """Two optimizers that step together."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def fsdp2(*, reshard: bool = True, blocks: int = 1, prefetch: int = 0) -> Build:
    """Return the builder of FSDP2: `fully_shard` on each group of `blocks` blocks, and on the root; 0: on the root alone.

    `reshard` frees the weights after forward; `prefetch` gathers as many groups ahead as that, in both passes.
    """
    def build(model: nn.Module, workload: Workload) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        every = workload.blocks(model)
        groups = [every[start:start + blocks] for start in range(0, len(every), blocks)] if blocks else []
        for group in groups:
            fully_shard(group if len(group) > 1 else group[0], mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard if not groups else None)
        firsts: list[Any] = [group[0] for group in groups]
        for number, first in enumerate(firsts if prefetch else []):
            first.set_modules_to_forward_prefetch(firsts[number + 1:number + 1 + prefetch])
            first.set_modules_to_backward_prefetch(firsts[max(0, number - prefetch):number][::-1])
        return _plain_step(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), workload)

    return build


def deepspeed(stage: int, *, leaves: bool = False, **zero: int | bool) -> Build:
    """Return the builder of DeepSpeed at `stage`, with more settings of its ZeRO block; `leaves`: blocks gather as one."""
    def build(model: nn.Module, workload: Workload) -> Step:
        import deepspeed  # pyright: ignore[reportMissingImports]  lives in .venv-peers

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        if leaves:
            deepspeed.utils.set_z3_leaf_modules(model, [type(block) for block in workload.blocks(model)[:1]])
        optimizer = {"type": "AdamW", "params": {**ADAMW, "betas": list(BETAS), "torch_adam": True, "fused": True}}
        config = _config({"stage": stage, **zero}, optimizer, workload)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        return _engine_step(engine, workload)

    return build


def shoal(stage: int, **more: Any) -> Build:
    """Return the builder of this library at `stage`, with `more` settings."""
    def build(model: nn.Module, workload: Workload) -> Step:
        import shoal

        optimizer = {"type": "AdamW", "params": {**ADAMW, "betas": list(BETAS)}}
        engine, *_ = shoal.initialize(model=model, config={**_config({"stage": stage}, optimizer, workload), **more})
        return _engine_step(engine, workload)

    return build


def lookups(stage: int, optimizer: str, *, rows: bool) -> Build:
    """Return the builder of this library for a model that looks words up: by `rows`, or with dense gradients."""
    def build(model: nn.Module, workload: Workload) -> Step:
        import shoal

        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = rows
        config = _config({"stage": stage}, {"type": optimizer, "params": {"lr": 1e-3}}, workload)
        engine, *_ = shoal.initialize(model=model, config={**config, "sparse_gradients": rows})
        return _engine_step(engine, workload)

    return build


def pipeline(schedule: str, *, all_in_flight: bool = False) -> Build:
    """Return the builder of this library's pipeline: a stage a rank, the weights of the one model that all systems train.

    With `all_in_flight` a rank may hold all microbatches of a step.
    """
    def build(model: nn.Module, workload: Workload) -> Step:
        import shoal

        specs = [shoal.LayerSpec(nn.Sequential, part) for part in workload.chain(model)]
        module = shoal.PipelineModule(layers=specs, num_stages=dist.get_world_size(), loss_fn=workload.loss,
                                      partition_method="parameters")
        optimizer = {"type": "AdamW", "params": {**ADAMW, "betas": list(BETAS)}}
        sequences = len(workload.batch(0, 0)[0]) * dist.get_world_size()
        config = {**_config({"stage": 0}, optimizer, workload),
                  "pipeline": {"schedule": schedule, "in_flight": workload.pieces if all_in_flight else None},
                  "train_micro_batch_size_per_gpu": sequences // workload.pieces,
                  "gradient_accumulation_steps": workload.pieces}
        engine, *_ = shoal.initialize(model=module, config=config)

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            microbatches = zip(inputs.chunk(workload.pieces), targets.chunk(workload.pieces), strict=True)
            return engine.train_batch(iter(microbatches)).detach()

        return step

    return build


def torch_pipeline(schedule: str) -> Build:
    """Return the builder of torch's pipeline: its `schedule`, a stage a rank, divided and trained as this library's."""
    def build(model: nn.Module, workload: Workload) -> Step:
        from torch.distributed import pipelining

        import shoal

        rank, ranks, parts = dist.get_rank(), dist.get_world_size(), workload.chain(model)
        bounds = shoal.PipelineModule(layers=[shoal.LayerSpec(nn.Sequential, part) for part in parts], num_stages=ranks,
                                      loss_fn=workload.loss, partition_method="parameters").partitions()
        mine = nn.Sequential(*parts[bounds[rank]:bounds[rank + 1]])
        stage: Any = pipelining.PipelineStage(mine, rank, ranks, torch.device("cpu"))
        kind = getattr(pipelining, schedule)
        run = kind(stage if schedule == "Schedule1F1B" else [stage], workload.pieces, loss_fn=workload.loss)
        optimizer = torch.optim.AdamW(mine.parameters(), fused=True, **ADAMW)

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            losses: list[Tensor] = []
            first, last = rank == 0, rank == ranks - 1
            run.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return ranks * torch.stack(losses).mean().detach() if losses else torch.zeros(())  # its mean over ranks counts

        return step

    return build


def _config(zero: dict[str, Any], optimizer: dict[str, Any], workload: Workload) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": len(workload.batch(0, 0)[0]), "gradient_accumulation_steps": 1,
            "optimizer": optimizer, "gradient_clipping": 0.0, "steps_per_print": 1_000_000_000,
            "zero_optimization": zero}


def _engine_step(engine: Any, workload: Workload) -> Step:
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = workload.loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
