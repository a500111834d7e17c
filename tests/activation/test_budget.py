"""A budget of saved tensors is never exceeded, and none that can be kept within it is recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.activation.budget import (
    RESTING,
    STAYING,
    ActivationPlan,
    BlockBytes,
    Budget,
    Moment,
    PassBytes,
    choose,
    describe,
    peak,
)
from shoal.errors import ConfigError
from shoal.pipeline.channel import Sender
from shoal.pipeline.layer import LayerSpec
from shoal.pipeline.module import PipelineModule
from shoal.tensor_parallel import Column, Plan, Row, parallelize
from shoal.testing import run_ranks
from shoal.tree import tensors_within, tree_map

from .test_activations import BLOCKS, ROWS, WIDTH, Block

MEGABYTE = 1 << 20


@st.composite
def _blocks(draw: st.DrawFn) -> list[BlockBytes]:
    found: list[BlockBytes] = []
    for _ in range(draw(st.integers(1, 8))):
        inputs, selective, kept = sorted(draw(st.lists(st.integers(1, 1000), min_size=3, max_size=3)))
        found.append(BlockBytes(inputs=inputs, selective=selective, kept=kept, staying=draw(st.integers(0, kept)),
                                staying_inputs=draw(st.integers(0, inputs))))
    return found


FULL, NONE = STAYING[0], STAYING[-1]
IN_FLIGHT = (frozenset({Moment(0, (2,), (0,)), Moment(None, (1,), (1,))}), frozenset({Moment(0, (0,), (0,))}))


@given(_blocks(), st.integers(0, 1000), st.integers(1, 20_000), st.sampled_from(IN_FLIGHT),
       st.sampled_from((STAYING, RESTING)))
def test_the_peak_of_a_choice_is_within_the_budget(blocks: list[BlockBytes], outside: int, budget: int,
                                                   moments: frozenset[Moment], plans: tuple[ActivationPlan, ...]) -> None:
    passes = [PassBytes(blocks=tuple(blocks), outside=outside, largest=1000)]
    choices = choose(passes, budget, moments, plans)
    if choices is None:
        assert peak(passes, [[plans[0]] * len(blocks)], moments) > budget
        return
    choice, = choices
    assert peak(passes, choices, moments) <= budget
    if plans is RESTING:
        return  # a block that keeps its tensors frees the room of a fetch ahead: its neighbour may take another plan
    for index, plan in enumerate(choice):  # and none can recompute less
        if plan != NONE:
            assert peak(passes, [[*choice[:index], NONE, *choice[index + 1:]]], moments) > budget


def test_the_peak_counts_a_block_that_is_recomputed_beside_earlier_ones() -> None:
    block = BlockBytes(inputs=1, selective=3, kept=10)
    passes = [PassBytes(blocks=(block,) * 3, outside=5)]
    assert peak(passes, [[FULL] * 3]) == 5 + 2 + 10
    assert peak(passes, [[FULL, FULL, NONE]]) == 5 + 2 + 10
    assert peak(passes, [[NONE] * 3]) == 5 + 30


def test_the_peak_recomputes_one_call_of_a_block_beside_all_others() -> None:
    repeated = BlockBytes(inputs=4, selective=12, kept=40, one_call=10)
    passes = [PassBytes(blocks=(repeated, repeated), outside=5)]
    assert peak(passes, [[FULL] * 2]) == 5 + 4 + 4 - 1 + 10
    assert peak(passes, [[FULL, NONE]]) == 5 + 4 + 40 - 1 + 10
    assert peak(passes, [[NONE] * 2]) == 5 + 80


def test_the_peak_counts_passes_in_flight_of_each_root() -> None:
    block = BlockBytes(inputs=1, selective=3, kept=10)
    passes = [PassBytes(blocks=(block,) * 3, outside=5), PassBytes(blocks=(block,), outside=0)]
    choices = [[FULL] * 3, [NONE]]
    assert peak(passes, choices, [Moment(0, (2, 1), (0, 0))]) == (5 + 2 + 10) + 2 * (5 + 3) + 10
    assert peak(passes, choices, [Moment(None, (1, 0), (2, 0)), Moment(1, (0, 0), (0, 0))]) == (5 + 3) + 2 * (5 + 30)


def _trained(section: dict[str, Any], rows: tuple[int, ...] = (ROWS, ROWS, ROWS)) -> tuple[list[float], list[str], int]:
    torch.manual_seed(0)
    engine = shoal.initialize(model=nn.Sequential(*[Block() for _ in range(2 * BLOCKS)], nn.Linear(WIDTH, 8)), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "activation_checkpointing": section})[0]
    losses: list[float] = []
    for count in rows:
        loss = engine(torch.randn(count, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    budget = None if engine.activations is None else engine.activations.budget
    engine.destroy()
    return (losses, [], 0) if budget is None else (losses, _modes(budget), budget.expected)


def _modes(budget: Budget) -> list[str]:
    return [each.recompute.value for choice in budget.choices for each in choice]


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_recompute_as_little_as_the_budget_allows(ranks: int) -> None:
    plain = run_ranks(ranks, _trained, {})
    shares: list[int] = []
    for budget in ("2.5MB", "4MB", "1GB"):
        found = run_ranks(ranks, _trained, {"budget": budget})
        assert [each[0] for each in found] == [each[0] for each in plain]
        choice, expected = found[0][1], found[0][2]
        shares.append(choice.count("none"))
        assert expected <= {"2.5MB": 2_500_000, "4MB": 4_000_000, "1GB": 10**9}[budget]
        assert all(each[1] == choice for each in found)
    assert shares[0] < shares[-1] == 2 * BLOCKS
    assert sorted(shares) == shares


def _piped(schedule: str, per_rank: int, budget: str | None) -> tuple[list[float], list[str], int, int]:
    """Train a pipeline; return the losses, the modes of this rank's blocks, and the peak as expected and as measured."""
    held = _LiveBytes()
    _send_copies()
    model = PipelineModule([LayerSpec(Block) for _ in range(4 * BLOCKS)], num_stages=2, loss_fn=nn.functional.mse_loss,
                           schedule=schedule, stages_per_rank=per_rank, partition_method="uniform", seed_layers=True,
                           base_seed=0)
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 6, "log_level": "error",
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "activation_checkpointing": {} if budget is None else {"budget": budget}})[0]
    torch.manual_seed(0)
    data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(6)]
    losses: list[float] = []
    for step in range(3):
        if step == 1 and engine.activations is not None and engine.activations.budget is not None:
            held.watch(engine.activations.budget)
        losses.append(engine.train_batch((x.clone(), y.clone()) for x, y in data).item())
    chosen = None if engine.activations is None else engine.activations.budget
    engine.destroy()
    return (losses, [], 0, 0) if chosen is None else (losses, _modes(chosen), chosen.expected, held.most)


def _send_copies() -> None:
    """Have this process send copies: a thread frees what was sent, and may do so long after the backward of its pass."""
    send = Sender.send

    def send_copy(sender: Sender, value: object) -> None:
        send(sender, tree_map(torch.clone, value))

    Sender.send = send_copy


class _LiveBytes:
    """The bytes of saved tensors that are alive when one more is saved."""

    def __init__(self) -> None:
        self.most = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def watch(self, budget: Budget) -> None:
        see = budget.see

        def seen(tensor: torch.Tensor, module: object, *, moves: bool = False) -> None:
            see(tensor, module, moves=moves)
            reference = StorageWeakRef(tensor.untyped_storage())
            self._seen = {key: each for key, each in self._seen.items() if not each[0].expired()}
            self._seen[reference.cdata] = reference, tensor.untyped_storage().nbytes()
            self.most = max(self.most, sum(size for _, size in self._seen.values()))

        budget.see = seen


@pytest.mark.parametrize(("schedule", "per_rank", "sizes"), [
    ("1f1b", 1, (5, 9, 1000)), ("interleaved", 2, (5, 1000)), ("zb-h1", 1, (11,)), ("zbv", 2, (11,))])
def test_a_budget_holds_over_all_passes_in_flight_of_a_pipeline(schedule: str, per_rank: int,
                                                                sizes: tuple[int, ...]) -> None:
    plain = run_ranks(2, _piped, schedule, per_rank, None)
    kept: list[int] = []
    for size in sizes:  # in MB
        found = run_ranks(2, _piped, schedule, per_rank, f"{size}MB")
        for (losses, modes, expected, measured), (usual, *_) in zip(found, plain, strict=True):
            assert losses == usual
            assert measured <= expected <= size * 1_000_000
            assert len(modes) == 2 * BLOCKS
        kept.append(sum(modes.count("none") for _, modes, *_ in found))
    assert sorted(set(kept)) == kept and kept[-1] == 4 * BLOCKS, "a smaller budget recomputes more, the largest nothing"


def _one_block_a_stage(section: dict[str, Any]) -> tuple[list[float], int]:
    model = PipelineModule([LayerSpec(Block) for _ in range(2)], num_stages=2, loss_fn=nn.functional.mse_loss,
                           partition_method="uniform", seed_layers=True)
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "log_level": "error", "activation_checkpointing": section,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})[0]
    torch.manual_seed(0)
    data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(2)]
    losses = [engine.train_batch(iter([microbatch])).item() for microbatch in data]
    count = len(engine.recomputed)
    engine.destroy()
    return losses, count


@pytest.mark.parametrize("section", [{"recompute": "full"}, {"budget": "1.1MB"}])
def test_a_block_that_is_alone_in_its_stage_repeats_those_of_others(section: dict[str, Any]) -> None:
    for (losses, count), (usual, _) in zip(run_ranks(2, _one_block_a_stage, section), run_ranks(2, _one_block_a_stage, {}),
                                           strict=True):
        assert losses == usual and count == 1


def _checkpointed_at_first() -> tuple[bool, list[str], list[float]]:
    """Return whether a first pass within a checkpoint chose anything, the choice after plain passes, and their losses."""
    torch.manual_seed(0)
    engine = shoal.initialize(model=nn.Sequential(*[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 8)), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "activation_checkpointing": {"budget": "1GB"}})[0]
    budget = None if engine.activations is None else engine.activations.budget
    assert budget is not None
    losses: list[float] = []
    for step in range(4):
        x = torch.randn(ROWS, WIDTH)
        loss = (checkpoint(engine, x, use_reentrant=False) if step == 0 else engine(x)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 1:
            early = bool(budget.choices)  # the pass of step 0 has ended
    modes = _modes(budget)
    engine.destroy()
    return early, modes, losses


def test_a_pass_within_a_checkpoint_of_the_script_measures_nothing() -> None:
    (early, modes, losses), = run_ranks(1, _checkpointed_at_first)
    assert not early and modes == ["none"] * BLOCKS
    assert losses == sorted(losses, reverse=True)


def test_the_peak_counts_what_is_fetched_ahead_of_a_block_that_rests() -> None:
    block, (recomputes, rests, keeps) = BlockBytes(inputs=2, selective=3, kept=10, staying_inputs=1, staying=2), RESTING
    passes = [PassBytes(blocks=(block,) * 3, outside=5, largest=4)]
    assert peak(passes, [[recomputes] * 3]) == 5 + 2 + (10 + 1) + 4
    assert peak(passes, [[rests] * 3]) == 5 + 2 * 2 + (10 + 8) + 4
    assert peak(passes, [[rests, rests, keeps]]) == 5 + 2 + (10 + 8) + 4
    assert peak(passes, [[rests, keeps, keeps]]) == 5 + 2 + 10 + 10
    assert peak(passes, [[rests, keeps, rests]]) == 5 + (2 + 10) + (10 + 8) + 4, "the first is fetched with the last"


def test_a_choice_is_described_block_by_block() -> None:
    block = BlockBytes(inputs=1, selective=3, kept=1000)
    measured = PassBytes(blocks=(block,) * 4, outside=0)
    assert describe(measured, [STAYING[0], STAYING[0], STAYING[1], NONE]) == (
        "blocks 0 to 1 recompute fully (1 bytes each), block 2 recomputes selectively (3 bytes), "
        "block 3 keeps (1,000 bytes)")
    assert describe(measured, [*RESTING[:2], RESTING[1], NONE]) == (
        "block 0 recomputes fully, from inputs that rest (0 bytes), blocks 1 to 2 rest (0 bytes each), "
        "block 3 keeps (1,000 bytes)")


def _resting(budget: str, folder: str) -> tuple[list[float], list[str], int, int]:
    """Return the losses, the plans, and the peak as expected and as measured of training whose blocks may rest on disk."""
    held = _LiveBytes()
    torch.manual_seed(0)
    engine = shoal.initialize(model=nn.Sequential(*[Block() for _ in range(2 * BLOCKS)], nn.Linear(WIDTH, 8)), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "activation_checkpointing": {"budget": budget, "rest": "nvme", "nvme_path": folder}})[0]
    assert engine.activations is not None and engine.activations.budget is not None
    losses: list[float] = []
    for step in range(4):
        if step == 2:
            held.watch(engine.activations.budget)
        loss = engine(torch.randn(ROWS, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = engine.activations.budget
    engine.destroy()
    return losses, [str(each) for choice in found.choices for each in choice], found.expected, held.most


def test_blocks_without_room_in_the_budget_rest_instead_of_recomputing(tmp_path: Path) -> None:
    (plain, *_), = run_ranks(1, _trained, {}, rows=(ROWS,) * 4)
    kept: list[int] = []
    for size in (3, 5, 1000):  # in MB
        (losses, plans, expected, measured), = run_ranks(1, _resting, f"{size}MB", str(tmp_path))
        assert losses == plain
        assert measured <= expected <= size * 1_000_000
        assert set(plans) <= {"rest", "keep"} and plans == sorted(plans, reverse=True), "the last blocks keep"
        kept.append(plans.count("keep"))
    assert kept == sorted(set(kept)) and kept[-1] == 2 * BLOCKS


def test_a_larger_batch_recomputes_more() -> None:
    (_, same, _), = run_ranks(1, _trained, {"budget": "4MB"})
    (_, grown, expected), = run_ranks(1, _trained, {"budget": "4MB"}, rows=(ROWS, ROWS, 2 * ROWS, ROWS))
    assert grown.count("none") < same.count("none") and expected <= 4_000_000


class _Skips(nn.Module):
    """Blocks of which a pass may skip some, or which fail at one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2 * BLOCKS))

    def forward(self, x: Tensor, skipped: tuple[int, ...] = (), failing: int | None = None) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index == failing:
                raise KeyError(index)
            if index not in skipped:
                x = block(x)
        return x


def _disturbed(rows: int, skipped: tuple[int, ...], failing: int | None) -> tuple[list[str], int, int]:
    """Return the modes, the expected and the highest peak of passes after a first one that is unlike them."""
    held = _LiveBytes()
    torch.manual_seed(0)
    engine: Any = shoal.initialize(model=_Skips(), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "activation_checkpointing": {"budget": "4MB"}})[0]
    try:
        loss = engine(torch.randn(rows, WIDTH), skipped, failing).square().mean()
        engine.backward(loss)
        engine.step()
    except KeyError:
        assert failing is not None
    held.watch(engine.activations.budget)
    for _ in range(3):
        engine.backward(engine(torch.randn(ROWS, WIDTH)).square().mean())
        engine.step()
    found = engine.activations.budget
    return _modes(found), found.expected, held.most


@pytest.mark.parametrize(("rows", "skipped", "failing"), [(ROWS, (), 1), (ROWS, (), 2), (ROWS, (0, 1, 2), None),
                                                          (ROWS, (1,), None)])
def test_a_first_pass_unlike_the_others_does_not_break_the_budget(rows: int, skipped: tuple[int, ...],
                                                                  failing: int | None) -> None:
    (plain, expected, _), = run_ranks(1, _disturbed, ROWS, (), None)
    (modes, found, most), = run_ranks(1, _disturbed, rows, skipped, failing)
    assert modes == plain and most <= 4_000_000
    assert found == pytest.approx(expected, rel=1e-3)


def _left() -> int:
    """Return the calls of a block in a pass of a plain model that is larger than those its engine measured."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(2 * BLOCKS)], nn.Linear(WIDTH, 8))
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "activation_checkpointing": {"budget": "4MB"}})[0]
    for _ in range(2):
        engine.backward(engine(torch.randn(ROWS, WIDTH)).square().mean())
        engine.step()
    engine.destroy()
    calls: list[int] = []
    model[0].register_forward_hook(lambda module, args, output: calls.append(1))
    model(torch.randn(4 * ROWS, WIDTH)).square().mean().backward()
    return len(calls)


def test_a_budget_leaves_with_its_engine() -> None:
    assert run_ranks(1, _left) == [1]


class _SavesMore(nn.Module):
    """Saves `extra` more bytes of each row on tensor rank 0, as where slices of a vocabulary are uneven."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        more = x.new_ones(x.shape[0], self.extra if dist.get_rank() == 0 else 1)
        return x + 0 * (x.sum(1, keepdim=True) * more).sum(1, keepdim=True)


def _uneven() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(2 * BLOCKS)], _SavesMore(16 * WIDTH))
    assert dist.group.WORLD is not None
    parallelize(model, dist.group.WORLD, Plan({"*.up": Column(), "*.down": Row()}))
    engine: Any = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "mesh": {"tensor": 2}, "timeout": 20, "activation_checkpointing": {"budget": "4MB"}})[0]
    for count in (ROWS, ROWS, 4 * ROWS // 3, ROWS):
        engine.backward(engine(torch.ones(count, WIDTH)).square().mean())
        engine.step()
    return _modes(engine.activations.budget)


def test_tensor_ranks_choose_alike_where_one_of_them_saves_more() -> None:
    first, second = run_ranks(2, _uneven)
    assert first == second


def test_too_small_a_budget_names_the_least() -> None:
    with pytest.raises(AssertionError, match=r"budget: got 70,000 bytes; with every block recomputed"):
        run_ranks(1, _trained, {"budget": 70_000})


@pytest.mark.parametrize(("section", "message"), [
    ({"budget": "12 lots"}, "budget"),
    ({"budget": 0}, "budget"),
    ({"budget": "1GB", "recompute": "full"}, "the budget chooses what is recomputed: remove one"),
])
def test_bad_budgets_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shoal.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "activation_checkpointing": section})


@pytest.mark.parametrize(("text", "size"), [("12GB", 12 * 10**9), ("512MiB", 512 * MEGABYTE), ("1.5kb", 1500), (70, 70)])
def test_sizes_are_bytes_or_texts_with_a_unit(text: object, size: int) -> None:
    from shoal.activation import ActivationSettings

    assert ActivationSettings.model_validate({"budget": text}).budget == size


class _Doubles(nn.Module):
    """A block whose output has twice as many rows as its input, so that later blocks of its kind save more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(2, 1)
        return x + self.down(nn.functional.gelu(self.up(x)))


def _growing() -> tuple[int, int]:
    """Return the budget, and the bytes of saved tensors that are alive after the forward of the second step."""
    budget = 20_000_000
    torch.manual_seed(0)
    engine: Any = shoal.initialize(model=nn.Sequential(*[_Doubles() for _ in range(4)]), config={
        "train_micro_batch_size_per_gpu": 1, "log_level": "error", "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "activation_checkpointing": {"budget": budget}})[0]
    engine.backward(engine(torch.randn(400, 64)).square().mean())
    engine.step()
    found: dict[int, tuple[StorageWeakRef, int]] = {}
    plain = engine.activations.budget.see

    def see(tensor: Tensor, module: object, *, moves: bool = False) -> None:
        storage = tensor.untyped_storage()
        found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        plain(tensor, module, moves=moves)

    engine.activations.budget.see = see
    output = engine(torch.randn(400, 64))
    alive = sum(size for reference, size in found.values() if not reference.expired())
    del output
    return budget, alive


def test_a_budget_holds_where_later_blocks_of_a_kind_save_more() -> None:
    budget, alive = run_ranks(1, _growing)[0]
    assert alive <= budget


class _Repeats(nn.Module):
    """Calls its blocks in turn several times, as a universal transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            for block in self.blocks:
                x = block(x)
        return x


class _LiveStorages(TorchDispatchMode):
    """The storages that operators have returned, and not those of weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {StorageWeakRef(each.untyped_storage()) for each in model.parameters()}
        self._found: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_within(output):
            self._found[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return output

    @property
    def bytes(self) -> int:
        return sum(size for each, size in self._found.items() if not each.expired() and each not in self._weights)


def _repeated(budget: int) -> tuple[list[str], int, int]:
    """Return the modes, the bytes that are alive after the last forward, and the expected peak."""
    torch.manual_seed(0)
    engine: Any = shoal.initialize(model=_Repeats(), config={
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "log_level": "error",
        "activation_checkpointing": {"budget": budget}})[0]
    alive = 0
    for _ in range(3):
        with _LiveStorages(engine.module) as live:
            output = engine(torch.randn(ROWS, WIDTH))
            alive = live.bytes
        engine.backward(output.square().mean())
        engine.step()
    return _modes(engine.activations.budget), alive, engine.activations.budget.expected


def test_a_budget_holds_for_blocks_that_a_pass_calls_several_times() -> None:
    least = 12 * ROWS * WIDTH * 4 + 1_000_000  # the inputs of all calls, and one call that is computed again
    shares: list[int] = []
    for budget in (least, 4_000_000, 6_000_000, 10**9):
        (modes, alive, expected), = run_ranks(1, _repeated, budget)
        assert alive <= expected <= budget
        shares.append(modes.count("full"))
    assert shares[0] == BLOCKS and shares[-1] == 0
    assert shares == sorted(shares, reverse=True)
