"""Ranks compare their arguments before anything is built, and their samples before training on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import PipelineError, RanksDisagree, ShoalError, UsageError
from shoal.testing import run_ranks

WIDTH = 4


def batches(count: int = 9, *, size: int = 2, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return iter([(torch.randn(size, WIDTH, generator=generator), torch.randn(size, WIDTH, generator=generator))
                 for _ in range(count)])


def engine_of(count: int = 4, module: dict[str, Any] | None = None, **config: Any) -> Any:
    made = shoal.PipelineModule([shoal.LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(count)], seed_layers=True,
                                **{"num_stages": dist.get_world_size(), "loss_fn": nn.functional.mse_loss} | (module or {}))
    return shoal.initialize(model=made, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "timeout": 30,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}} | config)[0]


def error_of(call: Callable[[], object], kind: type[ShoalError] = RanksDisagree) -> str:
    """Return the message of the error that `call` raises."""
    with pytest.raises(kind) as found:
        call()
    return str(found.value)


def different_arguments() -> list[str]:
    other = dist.get_rank() == 1
    sample = next(batches())
    return [
        error_of(lambda: engine_of(6 if other else 4)),
        error_of(lambda: engine_of(module={"partition_method": [0, 2, 4] if other else [0, 1, 4]})),
        error_of(lambda: engine_of(module={"schedule": "gpipe" if other else "1f1b"})),
        error_of(lambda: engine_of(pipeline={"schedule": "zb-h1" if other else "1f1b"})),
        error_of(lambda: engine_of(gradient_accumulation_steps=3 if other else 2)),
        error_of(lambda: engine_of(zero_optimization={"stage": 1 if other else 0})),
        error_of(lambda: engine_of(6 if other else 4, module={"partition_method": "profile", "sample": sample})),
        error_of(lambda: engine_of(gradient_accumulation_steps=0 if other else 2), ShoalError),
        error_of(lambda: engine_of(mesh={"tensor": 3} if other else {}), ShoalError),
    ]


def test_ranks_with_different_arguments_fail_before_building() -> None:
    found = run_ranks(2, different_arguments)
    for messages in found:
        for text, words in zip(messages, (
            "initialize: ranks differ in the number of layers: rank 0 has 4, rank 1 has 6; give every rank the same layers",
            "initialize: ranks differ in where stages begin: rank 0 has [0, 1, 4], rank 1 has [0, 2, 4]",
            "initialize: ranks differ in the schedule: rank 0 has '1f1b', rank 1 has 'gpipe'",
            "ranks differ in configuration, pipeline.schedule: rank 0 has '1f1b', rank 1 has 'zb-h1'",
            "configuration, train_batch_size: rank 0 has 4, rank 1 has 6",
            "configuration, zero_optimization.stage: rank 0 has 0, rank 1 has 1",
            "PipelineModule: ranks differ in layer 4: rank 0 has none, rank 1 has '4' (Linear) of 20 parameters",
            "gradient_accumulation_steps: got 0",
            "mesh: ",
        ), strict=True):
            assert words in text
    assert found[0][7].startswith("initialize: rank 1 failed, and the others wait for it: ")


def rank_local_settings() -> float:
    rank = dist.get_rank()
    engine = engine_of(steps_per_print=1 + rank, log_level="error" if rank else "warning", timeout=30 + rank)
    return engine.train_batch(batches()).item()


def test_ranks_may_differ_in_rank_local_settings() -> None:
    assert len(set(run_ranks(2, rank_local_settings))) == 1


def different_samples() -> list[str]:
    rank = dist.get_rank()
    engine = engine_of()
    messages = [error_of(lambda: engine.train_batch(batches(size=2 + rank)))]
    engine = engine_of()
    messages.append(error_of(lambda: engine.train_batch(batches(seed=rank))))
    messages.append(error_of(lambda: engine.eval_batch(batches(), num_micro_batches=1 + rank)))
    engine.train_batch(batches())  # the step had not begun
    messages.append(error_of(lambda: engine.eval_batch(batches(size=2 + rank))))
    messages.append(error_of(lambda: engine_of().eval_batch(batches(seed=rank))))
    engine = engine_of()
    messages.append(error_of(lambda: engine.train_batch(batches()) if rank else engine.eval_batch(batches())))
    debugged = engine_of(debug=True)
    debugged.train_batch(batches())
    messages.append(error_of(lambda: debugged.train_batch(batches(seed=rank))))
    return messages


def test_the_first_and_the_last_stage_must_draw_the_same_samples() -> None:
    for messages in run_ranks(2, different_samples):
        for text, words in zip(messages, (
            "train_batch: microbatch 0: rank 0 (stage 0) drew inputs of (2, 4) float32, rank 1 (stage 1) of (3, 4) float32; "
            "the ranks of the first and the last stage, and all their tensor ranks, draw the same samples",
            "train_batch: microbatch 0: rank 0 (stage 0) and rank 1 (stage 1) drew labels of one shape ((2, 4) float32) and "
            "other values",
            "ranks call different things: rank 0 is in eval_batch of 1 microbatches",
            "eval_batch: microbatch 0: rank 0 (stage 0) drew inputs of (2, 4) float32",
            "eval_batch: microbatch 0: rank 0 (stage 0) and rank 1 (stage 1) drew labels of one shape",
            "ranks call different things: rank 0 is in eval_batch of 2 microbatches, compute_loss=True, "
            "reduce_output='avg', bcast_loss=True, rank 1 in train_batch of 2 microbatches",
            "train_batch: microbatch 0: rank 0 (stage 0) and rank 1 (stage 1) drew labels",
        ), strict=True):
            assert words in text


def partial_samples() -> list[float]:
    """Each stage draws only the part that it uses; then inputs differ where they are not used."""
    rank, engine = dist.get_rank(), engine_of()
    partial = iter([(x, None) if rank == 0 else (None, y) for x, y in batches()])
    changed = iter([(x + rank, y) for x, y in batches()])
    return [engine.eval_batch(partial).item(), engine_of().eval_batch(changed).item()]


def test_a_stage_may_omit_the_part_that_it_does_not_use() -> None:
    found = run_ranks(2, partial_samples)
    assert found[0] == found[1] and found[0][0] == found[0][1]


def sizes_at_a_later_step() -> tuple[str, str, float]:
    engine, other = engine_of(timeout=20), dist.get_rank() == 1
    engine.train_batch(batches())
    sizes = [2, 3] if other else [2, 2]
    data = iter([next(batches(size=size)) for size in sizes])
    disagreement = error_of(lambda: engine.train_batch(data))
    after = engine.train_batch(batches()).item()
    parts = iter([(None, next(batches(size=3))[1]) if other else (next(batches())[0], None)] * 2)
    return disagreement, error_of(lambda: engine.train_batch(parts), PipelineError), after


def test_microbatch_sizes_that_differ_are_named_at_any_step() -> None:
    for disagreement, in_loss, after in run_ranks(2, sizes_at_a_later_step):
        sizes = "microbatch 1: rank 0 (stage 0) drew inputs of (2, 4) float32, rank 1 (stage 1) of (3, 4) float32"
        assert sizes in disagreement
        assert after > 0
        assert "(the output has 2 samples, and the labels 3; the ranks of the first and the last stage draw the" in in_loss


def ending(case: str) -> tuple[str, list[float], bool]:
    """Train a step, try one whose iterator ends early on some ranks, and train on."""
    engine, plain, rank = engine_of(3, {"num_stages": 2}), engine_of(3, {"num_stages": 2}), dist.get_rank()
    losses = [engine.train_batch(batches()).item()]
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    enough = {"all": False, "one": rank != 3, "some": rank == 1}[case]
    text = error_of(lambda: engine.train_batch(batches(2 if enough else 1)), UsageError)
    same = all(torch.equal(value, before[name]) for name, value in engine.module_state_dict().items())
    same = same and engine.global_steps == engine.micro_steps // 2 == 1
    losses += [engine.train_batch(batches(seed=2)).item(), engine.eval_batch(batches()).item()]
    wanted = [plain.train_batch(batches()).item(), plain.train_batch(batches(seed=2)).item(),
              plain.eval_batch(batches()).item()]
    return text, losses, same and losses == wanted


@pytest.mark.parametrize(("case", "who"), [
    ("all", "ranks 0, 1, 2, 3: "), ("one", "rank 3: "), ("some", "ranks 0, 2, 3: "),
])
def test_an_iterator_that_ends_early_leaves_the_engine_unchanged(case: str, who: str) -> None:
    for text, _, same in run_ranks(4, ending, case):
        assert text.startswith(f"{who}train_batch, step 2: the iterator ended after 1 of 2 microbatches; give it a multiple")
        assert text.count("train_batch") == 1 and same


def invalid_iterators() -> list[str]:
    def broken() -> Iterator[Any]:
        yield next(batches())
        raise OSError("disk gone")

    engine = engine_of()
    messages = [error_of(lambda data=data: engine.train_batch(data), UsageError)
            for data in (broken(), iter([(torch.zeros(2, WIDTH),) * 3] * 2), batches(1), [1, 2])]
    messages += [error_of(lambda count=count: engine.eval_batch(batches(), num_micro_batches=count), UsageError)
             for count in (0, -1, 1.5)]
    engine.train_batch(batches())
    return messages


def test_invalid_iterators_and_counts_are_refused_without_harm() -> None:
    for text, words in zip(run_ranks(2, invalid_iterators)[1], (
        "ranks 0, 1: train_batch, step 1: the iterator failed: OSError: disk gone",
        "the iterator gave a tuple of 3; each item is (inputs, labels)",
        "the iterator ended after 1 of 2 microbatches; give it a multiple of 2, or wrap the loader in",
        "got a list, which would start anew at every step; pass an iterator",
        "num_micro_batches: got 0; give a whole number of 1 or more, or None for the 2 of a step",
        "num_micro_batches: got -1", "num_micro_batches: got 1.5",
    ), strict=True):
        assert words in text


def refused_by_checks() -> tuple[list[str], str]:
    """Return the errors of engines that every rank refuses, and the error after one that rank 1 alone refuses."""
    recomputed: list[int] = []

    def recompute(function: Callable[..., Any], *inputs: Any) -> Any:
        recomputed.append(len(inputs))
        return checkpoint(function, *inputs, use_reentrant=False)

    module = shoal.PipelineModule([shoal.LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)], num_stages=2,
                                  seed_layers=True, loss_fn=nn.functional.mse_loss, activation_checkpoint_func=recompute)
    before = {name: value.clone() for name, value in module.state_dict().items()}

    def engine(config: dict[str, Any], optimizer: Any = None) -> Any:
        return shoal.initialize(model=module, optimizer=optimizer, config={
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "timeout": 30,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "pipeline": {"activation_checkpoint_interval": 1}} | config)[0]

    def assert_unchanged() -> None:
        module.stages[0](torch.ones(2, WIDTH)).sum().backward()
        assert not recomputed
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

    found: list[str] = []
    for config in ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 3}},
                   {"zero_optimization": {"offload_optimizer": {"device": "cpu", "step_in_backward": True}},
                    "gradient_clipping": 0},
                   {"pipeline": {"schedule": "zbv", "activation_checkpoint_interval": 1}}):
        found.append(error_of(lambda config=config: engine(config), ShoalError))
        assert_unchanged()
    trained = engine({})
    trained.train_batch(batches())
    assert recomputed
    trained.destroy()
    alone = error_of(lambda: engine({}, "AdamW" if dist.get_rank() == 1 else None).train_batch(batches()), ShoalError)
    return found, alone


def test_a_failed_check_leaves_a_pipeline_module_as_it_was() -> None:
    wrong = "initialize: optimizer is a str; pass an instance of a torch optimizer"
    for rank, (found, alone) in enumerate(run_ranks(2, refused_by_checks)):
        for text, words in zip(found, (
                "zero_optimization.stage: got 3 with OneBitAdam", "a pipeline takes its step when all its microbatches",
                "pipeline.schedule: got 'zbv'; the module was built for '1f1b'"), strict=True):
            assert words in text
        assert (f"rank 1: initialize failed: UsageError: {wrong}" if rank == 0 else wrong) in alone
