"""Every stage trains as plain PyTorch in one process does.

Feature, stage, dtype, accumulation and clipping would make 672 cases. A test of a feature at a stage takes each dtype once,
and accumulation and clipping in their turns, so that any three of the five meet in every combination.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.testing import run_ranks
from shoal.zero.placement import STAGES

from .models import FEATURES, batch, loss_of, turn_of
from .trained import Result, build, precision, train

RANKS, STEPS, LR, DECAY = 2, 4, 1e-2, 0.1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    feature: str
    dtype: str
    accumulation: int
    clipping: float


def cases_of(feature: str, stage: int) -> list[Case]:
    """Return one case of each dtype; over the stages a feature's dtype meets each accumulation with each clipping."""
    turn, others = turn_of(feature, stage), [(1, 0.0), (1, 0.5), (2, 0.0), (2, 0.5)]
    return [Case(feature, dtype, *others[(turn + index) % len(others)]) for index, dtype in enumerate(DTYPES)]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 2 * LR}]


def config(case: Case, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32", "timeout": 20,
        **precision(case.dtype),
    }


def sharded(cases: list[Case], stage: int) -> list[Result]:
    return [train(case.feature, config(case, stage), steps=STEPS, groups=groups) for case in cases]


def reference(case: Case, *, ranks_first: bool) -> Result:
    """Train in one process: masters in fp32, gradients summed over ranks before they are over microbatches, or after."""
    model = build(case.feature)
    masters = {p: p.detach().clone().requires_grad_() for p in model.parameters() if p.requires_grad}
    model.to(DTYPES[case.dtype])
    optimizer = torch.optim.AdamW(
        [{**group, "params": [masters[p] for p in group["params"]]} for group in groups(model)], lr=LR, weight_decay=DECAY,
        fused=True)
    scale = 128 if case.dtype == "fp16" else 1
    losses, norms = [], []
    for step in range(STEPS):
        gradients: dict[tuple[int, int], dict[nn.Parameter, Tensor]] = {}
        for rank in range(RANKS):
            for micro in range(case.accumulation):
                if isinstance(model, FEATURES["sometimes"]):
                    model.calls = step * case.accumulation + micro
                tokens, targets = batch(step, micro, rank)
                loss = loss_of(model(tokens), targets)
                (loss * (scale / case.accumulation)).backward()
                if rank == 0:
                    losses.append(loss.item())
                gradients[rank, micro] = {p: p.grad.float() for p in masters if p.grad is not None}
                model.zero_grad()
        for p, master in masters.items():
            parts = {key: found[p] for key, found in gradients.items() if p in found}
            master.grad = total(parts, case.accumulation, ranks_first=ranks_first)
            if master.grad is not None:
                master.grad /= scale
        present = [m for m in masters.values() if m.grad is not None]
        norms.append(torch.nn.utils.get_total_norm([m.grad for m in present]).item())
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(present, case.clipping)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
    return Result(losses, norms, {name: p.detach().float() for name, p in model.named_parameters()})


def total(parts: dict[tuple[int, int], Tensor], micros: int, *, ranks_first: bool) -> Tensor | None:
    """The mean over ranks and sum over microbatches of what there is, in the order of the engine's sums."""
    def add(addends: list[Tensor | None]) -> Tensor | None:
        present = [a for a in addends if a is not None]
        return sum(present[1:], start=present[0]) if present else None

    if ranks_first:
        means = [add([parts.get((rank, micro)) for rank in range(RANKS)]) for micro in range(micros)]
        return add([None if mean is None else mean / RANKS for mean in means])
    found = add([add([parts.get((rank, micro)) for micro in range(micros)]) for rank in range(RANKS)])
    return None if found is None else found / RANKS


@pytest.mark.parametrize("stage", range(len(STAGES)))
@pytest.mark.parametrize("feature", FEATURES)
def test_every_stage_trains_as_one_process_does(feature: str, stage: int) -> None:
    cases = cases_of(feature, stage)
    for case, result, *others in zip(cases, *run_ranks(RANKS, sharded, cases, stage), strict=True):
        expected = reference(case, ranks_first=STAGES[stage].shards_gradients)
        tolerance = 2e-6 if case.dtype == "fp32" else 2e-2
        assert result.losses == pytest.approx(expected.losses, rel=tolerance), case
        for other in others:
            assert all(torch.equal(other.weights[name], weight) for name, weight in result.weights.items()), case
        for name, weight in expected.weights.items():
            if case.dtype == "fp32" and not case.clipping:  # one rounding of a weight below 4: torch fuses multiply and add
                assert (result.weights[name] - weight).abs().max() <= 2**-21, (case, name)
            assert torch.allclose(result.weights[name], weight, rtol=tolerance, atol=tolerance), (case, name)
        if case.clipping or case.dtype != "fp32":
            assert result.norms == pytest.approx(expected.norms, rel=1e-5 if case.dtype == "fp32" else 5e-2), case
