"""Ulysses under its published names trains as one rank with whole sequences does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from shoal.compat import deepspeed
from shoal.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from shoal.compat.deepspeed.sequence.layer import DistributedAttention, single_all_to_all
from shoal.compat.deepspeed.utils import groups
from shoal.testing import run_ranks

transformers = pytest.importorskip("transformers")

WAYS = {"positions first": (1, 2, 0, (2, 0, 1, 3)), "batch first": (0, 2, 1, (0, 2, 1, 3)),
        "batch first, gather_idx left": (0, 2, 0, (0, 2, 1, 3)), "heads second": (0, 1, 2, (0, 1, 2, 3))}
"""By layout: the dims of batch and heads, gather_idx, and the order of dims that makes it of (batch, heads, length, dim)."""


def attend_by(layout: str, joined: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return output and gradients of this rank's part, and the same of one rank with everything."""
    batch_dim, heads_dim, gather, order = WAYS[layout]
    back = tuple(order.index(dim) for dim in range(4))
    made = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, heads, 8, 4, generator=made, requires_grad=True) for heads in (6, 2, 2)]

    def local(*operands: Tensor) -> Tensor:
        output = F.scaled_dot_product_attention(*(each.permute(back) for each in operands), is_causal=True, enable_gqa=True)
        output = output.permute(order)
        return output.flatten(2) if joined else output

    plain = local(*(each.permute(order) for each in whole)).square()
    plain.sum().backward()
    group = torch.distributed.group.WORLD
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = slice(8 // ranks * rank, 8 // ranks * (rank + 1))
    parts = [each.detach()[:, :, mine].requires_grad_() for each in whole]
    layer = DistributedAttention(local, group, scatter_idx=heads_dim, gather_idx=gather)
    output = layer(*(each.permute(order) for each in parts), batch_dim).square()
    output.sum().backward()
    positions = 3 - batch_dim - heads_dim
    of_part = plain.narrow(positions, mine.start, mine.stop - mine.start)
    return ([output, *(each.grad for each in parts if each.grad is not None)],
            [of_part, *(each.grad[:, :, mine] for each in whole if each.grad is not None)])


@pytest.mark.parametrize("joined", [False, True], ids=["", "heads joined"])
@pytest.mark.parametrize("layout", WAYS)
def test_distributed_attention_is_that_of_whole_sequences(layout: str, joined: bool) -> None:
    if joined and WAYS[layout][1] != 2:
        pytest.skip("heads are joined with their dim where they are beside it")
    for found, expected in run_ranks(2, attend_by, layout, joined):
        assert len(found) == 4
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def exchange() -> Tensor:
    rank = torch.distributed.get_rank()
    return single_all_to_all(torch.arange(8.0).view(2, 4) + 10 * rank, 1, 0, 0, None)


def test_an_exchange_scatters_one_dim_and_gathers_another() -> None:
    assert [each.tolist() for each in run_ranks(2, exchange)] == [
        [[0, 1], [4, 5], [10, 11], [14, 15]], [[2, 3], [6, 7], [12, 13], [16, 17]]]


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of 10 tokens; of every other one the first half has no labels."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(31, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": torch.where(torch.arange(10) < 5 * (index % 2), -100, tokens)}


def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=31, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=32, bos_token_id=1, eos_token_id=2))


def config(stage: int) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}}}


def alone() -> tuple[list[float], float]:
    engine: Any = deepspeed.initialize(model=model(), config=config(0))[0]
    losses: list[float] = []
    for batch in DataLoader(Sequences(), batch_size=2):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, evaluated(engine)


def evaluated(engine: Any) -> float:
    engine.eval()
    with torch.no_grad():
        return engine(**next(iter(DataLoader(Sequences(), batch_size=4)))).loss.item()


def split(stage: int) -> tuple[list[float], float]:
    """Train as the published tutorial does; each rank's loader has every other batch."""
    whole = model()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=whole, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=2,
        seq_length_is_variable=True, disable_in_eval=True)
    engine = deepspeed.initialize(model=whole, config=config(stage), mpu=mpu)[0]
    group = groups._get_sequence_parallel_group()  # pyright: ignore[reportPrivateUsage]  the published name
    rank = torch.distributed.get_rank()
    batches = [*DataLoader(Sequences(), batch_size=2)][rank::2]
    loader = UlyssesSPDataLoaderAdapter(batches, sp_rank=rank, sp_group=group, sp_world_size=2, device="cpu")
    losses: list[float] = []
    for batch in loader:
        assert batch["input_ids"].shape == (2, 5) and "labels" not in batch
        loss = engine.module.loss_function(logits=engine(**batch).logits, labels=None, vocab_size=31,
                                           shift_labels=batch["shift_labels"])
        each = torch.stack(differentiable.all_gather(loss, group=group))
        counts = torch.stack(differentiable.all_gather((batch["shift_labels"] != -100).sum(), group=group))
        loss = torch.where(counts > 0, each, 0).mul(counts).sum() / counts.sum()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert len(losses) == len(loader) == 4
    return losses, evaluated(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_tutorials_loop_has_the_losses_of_one_rank(stage: int) -> None:
    expected = run_ranks(1, alone)[0]
    for losses, evaluation in run_ranks(2, split, stage):
        assert losses == pytest.approx(expected[0], abs=2e-5)
        assert evaluation == pytest.approx(expected[1], abs=2e-5)


def uneven() -> str:
    mpu = UlyssesSPAttentionHF.register_with_transformers(model(), "sdpa", 2)
    batches = [*DataLoader(Sequences(), batch_size=2)][torch.distributed.get_rank():]
    group, rank = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank()
    with pytest.raises(ValueError, match="has ended") as caught:
        for _ in UlyssesSPDataLoaderAdapter(batches, rank, group, 2, "cpu"):
            pass
    with pytest.raises(ValueError, match=re.escape("of the 2 of sp_group")):
        UlyssesSPDataLoaderAdapter(batches, 1 - rank, group, 2, "cpu")
    return str(caught.value)


def test_a_loader_that_ends_early_is_named_on_every_rank() -> None:
    said = run_ranks(2, uneven)
    assert said[0] == said[1] and "sequence rank 1 has ended" in said[0]
