"""Row gradients with overflow, tiers, axes, checkpoints and hooks; and the errors where rows cannot be exchanged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.errors import UsageError
from shoal.tensor_parallel import ColumnLinear, RowLinear
from shoal.testing import RankFailed, run_ranks

from .embedding_models import COLUMNS, WORDS, Alone, Tied, Towers, beside_dense, differing, some, train


def overflowing(stage: int) -> tuple[list[str], list[int]]:
    def words(step: int, micro: int) -> Tensor:
        return some(step, micro)

    fp16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
    rows, _ = train(Alone, stage, True, words=words, fp16=fp16, steps=6, optimizer="Adam")
    dense, _ = train(Alone, stage, False, words=words, fp16=fp16, steps=6, optimizer="Adam")
    return differing(rows, dense), [int(torch.isfinite(value).all()) for value in rows.values()]


@pytest.mark.parametrize("stage", [0, 2])
def test_an_overflow_in_a_row_skips_the_step_for_all(stage: int) -> None:
    assert run_ranks(2, overflowing, stage) == [([], [1])] * 2


OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


class Cut(nn.Module):
    """An embedding that tensor ranks do not cut, before layers that they do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, COLUMNS, sparse=True)
        self.layers = nn.Sequential(ColumnLinear(COLUMNS, 32, dist.group.WORLD), RowLinear(32, 4, dist.group.WORLD))

    def forward(self, words: Tensor) -> Tensor:
        return self.layers(self.embed(words).sum(1))


def alike(step: int, micro: int) -> Tensor:
    """The same words on every rank: tensor ranks see the same samples."""
    return torch.randint(WORDS, (3, 6), generator=torch.Generator().manual_seed(10 * step + micro))


def elsewhere(folder: str) -> dict[str, list[str]]:
    disk = {"device": "nvme", "nvme_path": folder}
    return {
        **{f"disk, stage {stage}": beside_dense(Towers, stage, zero={"offload_optimizer": disk, "offload_param": disk})[0]
           for stage in (1, 3)},
        "masters on disk": beside_dense(Towers, 2, zero={"offload_optimizer": disk}, bf16={"enabled": True})[0],
        "copies": beside_dense(Towers, 2, mesh={"replica": 2})[0],
        "tensor ranks": beside_dense(Cut, 1, words=alike, mesh={"tensor": 2})[0],
    }


def test_rows_compose_with_tiers_and_axes(tmp_path: Path) -> None:
    for differ in run_ranks(2, elsewhere, str(tmp_path)):
        assert all(names == [] for names in differ.values()), differ


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


def piped(stage: int) -> list[str]:
    """Two stages of two data ranks each; the first has the embedding."""
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = shoal.PipelineModule(num_stages=2, loss_fn=nn.functional.mse_loss, layers=[
            shoal.LayerSpec(nn.Embedding, WORDS, COLUMNS, sparse=True), shoal.LayerSpec(Summed),
            shoal.LayerSpec(nn.Linear, COLUMNS, COLUMNS), shoal.LayerSpec(nn.Linear, COLUMNS, 4)])
        engine = shoal.initialize(model=model, config={
            "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "sparse_gradients": sparse,
            "zero_optimization": {"stage": stage}, "optimizer": {"type": "Adagrad", "params": {"lr": 0.05}}})[0]
        for step in range(3):
            engine.train_batch(iter([(some(step, micro), torch.zeros(3, 4)) for micro in range(2)]))
        found.append(engine.consolidated_state_dict() or {})
        engine.destroy()
    return differing(*found)


@pytest.mark.parametrize("stage", [1, 3])
def test_data_ranks_of_a_pipeline_stage_exchange_rows(stage: int) -> None:
    assert run_ranks(4, piped, stage) == [[]] * 4


def unsynced(stage: int) -> list[str]:
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        engine = shoal.initialize(model=Towers(), config={
            "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 3, "sparse_gradients": sparse,
            "zero_optimization": {"stage": stage}, "optimizer": {"type": "Adagrad", "params": {"lr": 0.05}}})[0]
        for micro in range(6):
            if micro % 3 == 1:
                with engine.no_sync():
                    engine.backward(engine(some(0, micro)).pow(2).sum())
            else:
                engine.backward(engine(some(0, micro)).pow(2).sum())
            engine.step()
        found.append(engine.consolidated_state_dict() or {})
        engine.destroy()
    return differing(*found)


@pytest.mark.parametrize("stage", [1, 3])
def test_microbatches_without_communication_merge_their_rows(stage: int) -> None:
    assert run_ranks(2, unsynced, stage) == [[], []]


def resumed(folder: str, stage: int, other: int, sparse: bool) -> list[str]:
    """Train three steps, save, and continue in this engine and in one of another stage and the other kind of gradients."""
    def engine_of(stage: int, sparse: bool) -> Any:
        torch.manual_seed(0)
        return shoal.initialize(model=Towers(), config={
            "train_micro_batch_size_per_gpu": 3, "sparse_gradients": sparse, "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.0, "optimizer": {"type": "Adam", "params": {"lr": 0.05}}})[0]

    def steps(engine: Any, first: int) -> None:
        for step in range(first, first + 3):
            engine.backward(engine(some(step, 0)).pow(2).sum())
            engine.step()

    engine, second = engine_of(stage, sparse), engine_of(other, not sparse)
    steps(engine, 0)
    engine.save_checkpoint(folder)
    steps(second, 7)  # it publishes rows of its own before it loads
    second.load_checkpoint(folder)
    for each in (engine, second):
        steps(each, 3)
    return differing(engine.consolidated_state_dict() or {}, second.consolidated_state_dict() or {})


@pytest.mark.parametrize(("stage", "other"), [(1, 3), (2, 1), (3, 0)])
@pytest.mark.parametrize("sparse", [True, False])
def test_checkpoints_are_independent_of_row_gradients(tmp_path: Path, stage: int, other: int, sparse: bool) -> None:
    assert run_ranks(2, resumed, str(tmp_path), stage, other, sparse)[0] == []


def written(stage: int) -> bool:
    """Whether the next step undoes the write of one rank into a weight, as with dense gradients."""
    torch.manual_seed(0)
    model = Alone()
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 3, "sparse_gradients": True, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}}})[0]
    for step in range(4):
        engine.backward(engine(some(step, 0)).pow(2).sum())
        engine.step()
        if step == 2 and dist.get_rank() == 0:
            with torch.no_grad():
                model.embed.weight[WORDS - 2].add_(1)  # rank 1 owns it
    mine = model.embed.weight.detach().clone()
    dist.broadcast(mine, 0)
    return torch.equal(mine, model.embed.weight)


def test_writes_of_one_rank_into_rows_of_another_are_undone() -> None:
    assert run_ranks(2, written, 1) == [True, True]


# Warnings and refusals


def said(caplog: pytest.LogCaptureFixture, model: nn.Module, sparse: bool = True, steps: int = 1) -> str:
    """Train on this one rank, and return the warnings."""
    with caplog.at_level(logging.WARNING, logger="shoal"):
        engine = shoal.initialize(model=model, config={
            "train_micro_batch_size_per_gpu": 3, "sparse_gradients": sparse,
            "optimizer": {"type": "SGD", "params": {"lr": 0.05}}})[0]
        for step in range(steps):
            engine.backward(engine(some(step, 0)).pow(2).sum())
            engine.step()
        engine.destroy()
    return caplog.text


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.log._warned", set[str]())


@pytest.mark.usefixtures("unsaid")
@pytest.mark.parametrize(("model", "sparse", "expected"), [
    (Alone, False, 'the sparse gradient of \'embed.weight\' is made dense and reduced whole; set "sparse_gradients": true'),
    (lambda: Tied(by_hand=False), True, "embedding 'embed', Embedding(600, 24), shares its weight with a module"),
    (lambda: Tied(by_hand=True), True, "the gradient of unit 'embed' is dense, because another module than the"),
    (lambda: nn.Sequential(nn.Embedding(WORDS, 4, sparse=True), nn.Linear(4, 4)), True, ""),
])
def test_one_warning_names_embeddings_that_are_reduced_whole(
        caplog: pytest.LogCaptureFixture, model: Callable[[], nn.Module], sparse: bool, expected: str) -> None:
    text = said(caplog, model(), sparse, steps=2)
    assert text.count(expected) == 1 if expected else text == ""


@pytest.mark.usefixtures("unsaid")
def test_a_large_embedding_with_dense_gradients_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Embedding(WORDS, 4, sparse=True), nn.Linear(4, 4))
    model.register_module("positions", nn.Embedding(1 << 12, 64))
    with caplog.at_level(logging.WARNING, logger="shoal"):
        shoal.initialize(model=model, config={"train_batch_size": 1, "sparse_gradients": True,
                                              "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})[0].destroy()
    assert "embedding 'positions', Embedding(4096, 64), has dense gradients, which are reduced whole" in caplog.text


@pytest.mark.parametrize(("model", "expected"), [
    (lambda: nn.Linear(3, 3), "the model has no trainable nn.Embedding or nn.EmbeddingBag, or set it to false"),
    (lambda: Alone(sparse=False), r"build 'embed' \(600, 24\) with sparse=True, or set it to false"),
    (lambda: nn.Sequential(nn.Embedding(5, 4, sparse=True, max_norm=2.0)),
     r"embedding '0', Embedding\(5, 4\), has max_norm=2"),
    (lambda: nn.Sequential(nn.Embedding(5, 4, sparse=True, scale_grad_by_freq=True)), "has scale_grad_by_freq=True"),
    (lambda: nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True, mode="max")), "has mode='max'"),
])
def test_unsupported_sparse_embeddings_are_refused_by_name(model: Callable[[], nn.Module], expected: str) -> None:
    with pytest.raises(UsageError, match=f"sparse_gradients: .*{expected}"):
        shoal.initialize(model=model(), config={"train_batch_size": 1, "sparse_gradients": True,
                                                "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})


def hooked(stage: int) -> Tensor:
    """Return the weight that a forward hook on an embedding at stage 3 sees where no rows were looked up."""
    torch.manual_seed(0)
    model = Alone()
    seen: list[Tensor] = []
    model.embed.register_forward_hook(lambda module, args, output: seen.append(module.weight.detach().clone()))
    expected = model.embed.weight.detach().clone()
    engine = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 3, "sparse_gradients": True, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}}})[0]
    with torch.no_grad():
        engine(some(0, 0))
    return torch.tensor([torch.equal(seen[0], expected)])


def test_a_hook_that_reads_the_whole_weight_sees_all_of_it() -> None:
    assert all(run_ranks(2, hooked, 3))


def beyond(word: int) -> None:
    engine = shoal.initialize(model=Alone(), config={
        "train_micro_batch_size_per_gpu": 3, "sparse_gradients": True, "zero_optimization": {"stage": 3}, "timeout": 20,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}}})[0]
    engine(torch.tensor([[1, word]]))


@pytest.mark.parametrize("word", [-1, WORDS])
def test_an_index_out_of_range_raises_torchs_own_error(word: int) -> None:
    with pytest.raises(RankFailed, match="index out of range"):
        run_ranks(2, beyond, word)
