"""Embedding, head and loss with a sliced vocabulary equal the plain ones, also for indivisible vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import UsageError
from shoal.mesh.tensor_slice import cuts_of
from shoal.tensor_parallel import Axis, VocabularyEmbedding, VocabularyHead, vocabulary_cross_entropy
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

from .test_layers import assert_equal, gradients, joined, world

HIDDEN, TOKENS = 6, (2, 4)
WORDS = (3, 10, 12)
"""Fewer than ranks, not a multiple, a multiple."""


class Plain(nn.Module):
    def __init__(self, words: int, *, tied: bool, bias: bool):
        super().__init__()
        self.embed = nn.Embedding(words, HIDDEN, padding_idx=1)
        self.head = nn.Linear(HIDDEN, words, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


class Cut(Plain):
    def __init__(self, words: int, *, tied: bool, bias: bool, gather: bool = True, sequence_dim: int | None = None):
        nn.Module.__init__(self)
        self.embed = VocabularyEmbedding(words, HIDDEN, world(), padding_idx=1, sequence_dim=sequence_dim)
        self.head = VocabularyHead(HIDDEN, words, world(), bias=bias, gather_output=gather, sequence_dim=sequence_dim)
        if tied:
            self.head.weight = self.embed.weight


def ids(words: int) -> Tensor:
    return torch.randint(words, TOKENS, generator=torch.Generator().manual_seed(3))


def model_parity(words: int, tied: bool, sequence_dim: int | None) -> None:
    torch.manual_seed(1)
    plain = Plain(words, tied=tied, bias=not tied)
    torch.manual_seed(1)
    mine = Cut(words, tied=tied, bias=not tied, sequence_dim=sequence_dim)
    assert_equal(joined(mine, dict(mine.named_parameters(remove_duplicate=False))),
                 dict(plain.named_parameters(remove_duplicate=False)))
    scores, wanted = mine(ids(words)), plain(ids(words))
    torch.testing.assert_close(scores, wanted)
    weight = torch.randn(wanted.shape)
    (scores * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert_equal(joined(mine, gradients(mine)), gradients(plain))
    for name, parameter in mine.named_parameters():
        cut = cuts_of(mine)[name]
        assert parameter.grad is not None
        assert not parameter[cut.length:].any() and not parameter.grad[cut.length:].any(), f"padding of {name}"


@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("words", WORDS)
def test_a_sliced_vocabulary_equals_the_plain_one(words: int, tied: bool, sequence_dim: int | None) -> None:
    run_ranks(4, model_parity, words, tied, sequence_dim)


def test_one_rank_takes_the_same_path() -> None:
    run_ranks(1, model_parity, 10, True, None)


def converted(words: int) -> None:
    torch.manual_seed(1)
    plain = Plain(words, tied=False, bias=True)
    mine = Cut(words, tied=False, bias=True)
    mine.embed = VocabularyEmbedding.from_embedding(plain.embed, world())
    mine.head = VocabularyHead.from_linear(plain.head, world())
    torch.testing.assert_close(mine(ids(words)), plain(ids(words)))
    assert_equal(joined(mine, dict(mine.named_parameters())), dict(plain.named_parameters()))


@pytest.mark.parametrize("words", WORDS)
def test_layers_take_their_slices_of_whole_layers(words: int) -> None:
    run_ranks(4, converted, words)


def padded_alike(words: int) -> tuple[int, ...]:
    return tuple(VocabularyEmbedding(words, HIDDEN, world()).weight.shape)


def test_every_rank_holds_the_same_number_of_rows() -> None:
    assert run_ranks(4, padded_alike, 10) == [(3, HIDDEN)] * 4


TOLERANCES = {torch.bfloat16: {"rtol": 1e-2, "atol": 1e-3}, torch.float8_e4m3fn: {"rtol": 0.07, "atol": 2e-3}}
"""One rounding of a gradient."""


def loss_parity(words: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(2)
    whole, targets = (3 * torch.randn(5, 7, words)).to(dtype), torch.randint(words, (5, 7))
    if options.get("ignore_index") is not None:
        targets[torch.rand(targets.shape) < 0.4] = options["ignore_index"]
    plain = whole.float().clone().requires_grad_()
    wanted = functional.cross_entropy(plain.flatten(0, 1), targets.flatten(), **options)
    weight = torch.rand(wanted.shape)
    (wanted * weight).sum().backward()
    assert plain.grad is not None
    length, rank = -(-words // dist.get_world_size()), dist.get_rank()
    rows = slice(rank * length, (rank + 1) * length)
    mine = whole[..., rows].clone().requires_grad_()
    loss = vocabulary_cross_entropy(mine, targets, world(), words=words, **options)
    (loss.flatten() * weight.flatten()).sum().backward()
    assert mine.grad is not None and mine.grad.dtype == dtype and loss.dtype == torch.float32
    torch.testing.assert_close(loss.flatten(), wanted.flatten())
    torch.testing.assert_close(mine.grad.float(), plain.grad[..., rows], **TOLERANCES.get(dtype, {}))
    losses: list[Tensor] = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss.detach())
    assert all(torch.equal(other, loss.detach()) for other in losses)


@pytest.mark.parametrize("options", [
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": -100},
    {"ignore_index": 1, "label_smoothing": 0.3, "reduction": "none"}], ids=str)
@pytest.mark.parametrize("words", WORDS)
def test_the_loss_is_that_of_torch(words: int, options: dict[str, Any]) -> None:
    run_ranks(4, loss_parity, words, torch.float32, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_loss_of_narrow_scores_is_in_fp32(dtype: torch.dtype) -> None:
    run_ranks(2, loss_parity, 10, dtype, {"label_smoothing": 0.1, "reduction": "sum"})


def prices() -> list[tuple[int, int]]:
    axis, found = Axis(world()), list[tuple[int, int]]()
    embed, head = VocabularyEmbedding(12, HIDDEN, world()), VocabularyHead(HIDDEN, 12, world(), gather_output=False)
    gathered = VocabularyHead(HIDDEN, 10, world())
    split = VocabularyEmbedding(12, HIDDEN, world(), sequence_dim=1)
    hidden = torch.zeros(*TOKENS, HIDDEN, requires_grad=True)
    scores = torch.zeros(*TOKENS, 12 // axis.ranks, requires_grad=True)
    for way in (lambda: embed(ids(12)), lambda: head(hidden), lambda: gathered(hidden), lambda: split(ids(12)),
                lambda: vocabulary_cross_entropy(scores, ids(12), world(), words=12),
                lambda: vocabulary_cross_entropy(scores, ids(12), world(), words=12, label_smoothing=0.1)):
        start = traffic.bytes_sent
        result = way()
        middle = traffic.bytes_sent
        result.sum().backward()
        found.append((middle - start, traffic.bytes_sent - middle))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_are_those_of_the_docstrings(ranks: int) -> None:
    tokens = TOKENS[0] * TOKENS[1]
    part, peers = 4 * tokens * HIDDEN * (ranks - 1) // ranks, ranks - 1
    assert run_ranks(ranks, prices) == [[(2 * part, 0), (0, 2 * part), (4 * tokens * -(-10 // ranks) * peers, 2 * part),
                                         (part, part), (8 * tokens * peers, 0), (12 * tokens * peers, 0)]] * ranks


def refusals() -> list[str]:
    embed, said = VocabularyEmbedding(10, HIDDEN, world()), list[str]()
    scores, targets = torch.zeros(2, 5), torch.zeros(2, dtype=torch.long)
    for call in (lambda: embed(torch.tensor([3, 10])), lambda: embed(torch.tensor([-1, 3])),
                 lambda: VocabularyEmbedding.from_embedding(nn.Embedding(10, 2, max_norm=1.0), world()),
                 lambda: vocabulary_cross_entropy(scores, targets, world(), words=13),
                 lambda: vocabulary_cross_entropy(scores, targets + 10, world(), words=10),
                 lambda: vocabulary_cross_entropy(scores, targets, world(), words=10, reduction="average"),
                 lambda: vocabulary_cross_entropy(scores, targets, world(), words=10, label_smoothing=2.0)):
        with pytest.raises(UsageError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_ids_out_of_the_vocabulary_are_refused_on_every_rank() -> None:
    starts = ("VocabularyEmbedding: got ids from 3 to 10; the vocabulary has 10 words, 0 to 9",
              "VocabularyEmbedding: got ids from -1 to 3",
              "an embedding with max_norm=1.0 cannot be sliced over ranks; leave",
              "vocabulary_cross_entropy: got scores (2, 5) and targets (2,); of 13 words this rank has",
              "vocabulary_cross_entropy: got target 10; targets are 0 to 9, or ignore_index (-100)",
              "vocabulary_cross_entropy: reduction: got 'average'; choose mean, sum, none",
              "vocabulary_cross_entropy: label_smoothing: got 2.0; it lies between 0 and 1")
    for rank, said in enumerate(run_ranks(2, refusals)):
        fits = [one.startswith(start) for one, start in zip(said, starts, strict=True)]
        assert fits == [True] * len(starts), (rank, said)
