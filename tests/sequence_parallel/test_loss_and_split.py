"""A batch is cut into equal parts, and the loss of the parts is that of the whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import NotServed, UsageError
from shoal.sequence_parallel import SequenceAxis, cross_entropy, mean_loss, split_batch
from shoal.sequence_parallel.loss import SequenceLoss
from shoal.testing import run_ranks

WORDS, LENGTH = 7, 12


def logits_and_labels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(WORDS, (2, LENGTH), generator=generator)
    labels[0, :8], labels[1, 10:] = -100, -100  # the first rank has fewer, of 3 it has few
    return torch.randn(2, LENGTH, WORDS, generator=generator), labels


def loss_of_parts() -> tuple[float, Tensor]:
    axis = SequenceAxis(dist.group.WORLD)
    logits, labels = (each[:, axis.part(LENGTH)] for each in logits_and_labels())
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, labels, axis)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_loss_is_the_mean_over_the_tokens_of_all_ranks(ranks: int) -> None:
    logits, labels = logits_and_labels()
    expected = F.cross_entropy(logits.requires_grad_().flatten(0, 1), labels.flatten())
    expected.backward()
    found = run_ranks(ranks, loss_of_parts)
    assert [loss for loss, _ in found] == pytest.approx([expected.item()] * ranks, rel=1e-6)
    assert len({loss for loss, _ in found}) == 1
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found], 1) / ranks, logits.grad)


def parts() -> list[dict[str, Tensor]]:
    axis = SequenceAxis(dist.group.WORLD)
    tokens = torch.arange(22).view(2, 11)
    batch = {"input_ids": tokens, "labels": tokens.clone(), "weight": torch.ones(2, 3), "features": torch.ones(2, 16)}
    kinds = {"input_ids": tokens[:, :8], "labels": torch.ones(2, 5)}  # several kinds of a text, and no labels of tokens
    assert split_batch(kinds, axis, causal=False)["labels"] is kinds["labels"]
    return [split_batch(batch, axis, multiple=4, padding_token=99), split_batch({"input_ids": tokens[:, :8]}, axis)]


def test_a_batch_is_padded_shifted_and_cut() -> None:
    (first, plain), (second, _) = run_ranks(2, parts)
    assert first["input_ids"].shape == (2, 8) and second["input_ids"][0].tolist() == [8, 9, 10, *[99] * 5]
    assert second["attention_mask"][0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert first["shift_labels"][0].tolist() == [*range(1, 9)]  # the label of its last position is on the other rank
    assert second["shift_labels"][0].tolist() == [9, 10, *[-100] * 6] and second["labels"][1, 3:].tolist() == [-100] * 5
    assert second["position_ids"][1].tolist() == [8, 9, *[10] * 6] and first["weight"].shape == (2, 3)
    assert first["features"].shape == (2, 16)  # as many as there are positions with padding
    assert sorted(plain) == ["input_ids", "position_ids"]


def given_labels_and_positions() -> dict[str, Tensor]:
    tokens = torch.tensor([[5, 1, 6, 7, 1]])
    return split_batch({"input_ids": tokens, "shift_labels": tokens}, SequenceAxis(dist.group.WORLD), padding_token=1,
                       positions="tokens", multiple=4)


def test_padding_has_no_label_and_no_position_of_a_token() -> None:
    first, second = run_ranks(2, given_labels_and_positions)
    assert first["position_ids"].tolist() == [[2, 1, 3, 4]] and second["position_ids"].tolist() == [[1, 1, 1, 1]]
    assert second["shift_labels"].tolist() == [[1, -100, -100, -100]]


def what_fills_up() -> dict[str, list[int]]:
    tokens = torch.full((1, 3), 5)
    batch = {"input_ids": tokens, "token_type_ids": tokens, "seen": tokens.bool(), "position_ids": torch.tensor([[7, 8, 9]])}
    part = split_batch(batch, SequenceAxis(dist.group.WORLD), padding_token=30, multiple=5)
    return {name: values[0, 3:].int().tolist() for name, values in part.items()}


def test_the_padding_token_fills_up_tokens_alone() -> None:
    assert run_ranks(1, what_fills_up)[0] == {"input_ids": [30, 30], "token_type_ids": [0, 0], "seen": [0, 0],
                                              "position_ids": [9, 9], "attention_mask": [0, 0]}


def packed() -> list[bool]:
    axis = SequenceAxis(dist.group.WORLD)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])  # the second document begins where the second rank does
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "position_ids": positions}
    for given in (positions, positions[:, [4, 5, 6, 7, 0, 1, 2, 3]]):
        with pytest.raises(NotServed, match="as where documents are packed"):
            split_batch({**batch, "input_ids": torch.zeros(2, 8, dtype=torch.int64), "position_ids": given}, axis)
    encoder = split_batch(batch, axis, causal=False)  # an encoder takes them as positions alone
    assert torch.equal(encoder["position_ids"], positions[:, axis.part(8)])
    part = split_batch({**batch, "attention_mask": torch.ones(1, 8)}, axis)
    return part["position_ids"][0].tolist()


def test_packed_documents_are_refused_on_every_rank() -> None:
    assert run_ranks(2, packed) == [[0, 1, 2, 3]] * 2


def join_again() -> list[int]:
    axis = SequenceAxis(dist.group.WORLD)
    mask = torch.ones(1, 2, dtype=torch.bool)
    first, again = axis.join(mask), axis.join(mask)
    mask[:, axis.rank] = False
    with pytest.raises(UsageError, match="was written to since it was joined; give a new one on every rank"):
        axis.join(mask)
    return [first is again, *axis.join(mask.clone()).int().flatten().tolist()]


def test_a_mask_that_was_written_to_is_joined_as_a_new_one() -> None:
    assert run_ranks(2, join_again) == [[1, 0, 1, 1, 0]] * 2


def refusals() -> list[str]:
    axis = SequenceAxis(dist.group.WORLD)
    logits, labels = torch.zeros(1, 4, WORDS), torch.zeros(1, 4, dtype=torch.int64)
    calls = (lambda: split_batch({"pixels": logits}, axis),
             lambda: split_batch({"inputs_embeds": logits}, axis, positions="tokens"),
             lambda: split_batch({"input_ids": labels}, axis, positions="words"),  # pyright: ignore[reportArgumentType]
             lambda: split_batch({"input_ids": labels[0]}, axis),
             lambda: split_batch({"input_ids": labels, "labels": labels[:, :3]}, axis),
             lambda: mean_loss(logits, 1, axis),
             lambda: cross_entropy(logits, labels[:, :3], axis), lambda: SequenceLoss(axis)(logits, labels, WORDS),
             lambda: SequenceLoss(axis)(logits, shift_labels=labels, num_items_in_batch=4))
    said: list[str] = []
    for call in calls:
        with pytest.raises(UsageError) as found:
            call()
        said.append(str(found.value))
    return said


def test_batches_and_losses_that_do_not_fit_are_refused() -> None:
    texts = ("split: got pixels; a batch has its sequence as one of input_ids",
             "counts the ids of tokens, and the sequence is inputs_embeds (1, 4, 7)", "got positions='words'",
             "split: input_ids is (4,); give (batch, length, ...), such as one sequence by input_ids.unsqueeze(0)",
             "split: labels are (1, 3), and the sequence has 4 positions; give a label of each position, -100 where",
             "mean_loss: total has shape (1, 4, 7)",
             "cross_entropy: logits (1, 4, 7) and labels (1, 3)", "got labels without shift_labels",
             "num_items_in_batch is counted over the ranks here")
    for said, text in zip(run_ranks(1, refusals)[0], texts, strict=True):
        assert text in said
