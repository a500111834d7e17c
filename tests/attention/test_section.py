"""The section `sparse_attention`: `initialize` gives it to models of transformers; published scripts read it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import log
from shoal.attention import sparsity_config, use_sparse_attention
from shoal.compat.deepspeed.runtime.config import DeepSpeedConfig
from shoal.compat.tolerance import tolerate
from shoal.engine.schema import Config
from shoal.errors import ConfigError, NotServed
from shoal.testing import run_ranks

SECTION = {"mode": "bigbird", "num_random_blocks": 1, "block": 16}


def settings(**more: Any) -> dict[str, Any]:
    return {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0, **more}


def bert() -> Any:
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = bert()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits


def losses(ranks: int, stage: int, *, by_section: bool) -> list[float]:
    """Return the losses of two steps of a model whose attention is replaced by the section, or by hand."""
    model = Wrapper()
    if not by_section:
        use_sparse_attention(model.model, SECTION)
    engine, *_ = shoal.initialize(model=model, config=settings(
        zero_optimization={"stage": stage}, **({"sparse_attention": SECTION} if by_section else {})))
    ids = torch.randint(50, (2, 80), generator=torch.Generator().manual_seed(4))[engine.global_rank::ranks]
    found: list[float] = []
    for _ in range(2):
        loss = engine(ids).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(float(loss))
    return found


def by_both(ranks: int, stage: int) -> tuple[list[float], list[float]]:
    return losses(ranks, stage, by_section=True), losses(ranks, stage, by_section=False)


@pytest.mark.parametrize("stage", [0, 3])
def test_training_by_the_section_is_training_of_a_replaced_model(stage: int) -> None:
    bert()
    found = run_ranks(2, by_both, 2, stage)
    for section, replaced in found:
        assert section == replaced and section[0] != section[1]


def llama_losses(ranks: int) -> list[float]:
    """Return the losses of a model of random blocks and attention dropout, whose heads the ranks share."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=256, initializer_range=0.3))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5  # in the configuration, ranks would be seeded apart
    split: dict[str, Any] = {"mesh": {"tensor": ranks}, "tensor_parallel": {"autotp_size": ranks}} if ranks > 1 else {}
    engine, *_ = shoal.initialize(model=model, config=settings(sparse_attention=SECTION, **split))
    torch.manual_seed(7)
    ids = torch.randint(50, (2, 160), generator=torch.Generator().manual_seed(4))
    found: list[float] = []
    for _ in range(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def test_tensor_ranks_see_the_blocks_of_one_rank_and_drop_as_it_does() -> None:
    bert()
    (one,) = run_ranks(1, llama_losses, 1)
    for found in run_ranks(2, llama_losses, 2):
        assert found == pytest.approx(one, rel=1e-5)


def plain_model(folder: str) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log.logger.addHandler(handler)
    shoal.initialize(model=nn.Linear(2, 2), config=settings(sparse_attention=SECTION))
    return records


def test_a_model_of_another_kind_is_left_alone_with_a_warning() -> None:
    (records,) = run_ranks(1, plain_model, "")
    assert [record for record in records if record.startswith("sparse_attention: Linear has no model of Hugging Face")]


def failing() -> tuple[str, str]:
    model = bert()
    before = model.config._attn_implementation
    with pytest.raises(TypeError):
        shoal.initialize(model=model, lr_scheduler=lambda: None,  # pyright: ignore
                         config=settings(sparse_attention=SECTION))
    return before, model.config._attn_implementation


def test_a_failed_initialize_gives_the_attention_back() -> None:
    bert()
    ((before, after),) = run_ranks(1, failing)
    assert before == after == "sdpa"


def test_a_resolved_section_resolves_to_itself() -> None:
    config = Config.resolve(settings(sparse_attention={"num_local_blocks": 8}), data_ranks=1)
    assert config.sparse_attention.mode == "fixed"
    again = Config.resolve(config.as_dict(), data_ranks=1)
    assert again.sparse_attention == config.sparse_attention
    assert Config.resolve(settings(), data_ranks=1).sparse_attention.mode is None


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mode": ({"mode": "x"}, r"sparse_attention.mode: got \"x\"; choose"),
    "rules": ({"num_local_blocks": 4, "num_global_blocks": 3}, "num_local_blocks: got 4, no multiple"),
    "a key of another mode": ({"mode": "dense", "num_local_blocks": 8}, "num_local_blocks: has no effect with mode 'dense'"),
    "block": ({"block": 0}, "sparse_attention.block"),
    "rules of a layout": ({"mode": "bigbird", "attention": "unidirectional", "num_random_blocks": 2},
                          "num_random_blocks: got 2 beside attention 'unidirectional'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_section_is_refused_when_it_is_read(case: str) -> None:
    section, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        Config.resolve(settings(sparse_attention=section), data_ranks=1)


@pytest.mark.parametrize("section", [{"mode": "nope"}, {"mode": 3}, {"mode": "bigbird", "attention": "x"},
                                     {"attention": None}])
def test_an_unknown_kind_is_a_notimplementederror_too(section: dict[str, Any]) -> None:
    for resolved in (lambda: Config.resolve(settings(sparse_attention=section), data_ranks=1),
                     lambda: sparsity_config(section, 4)):
        with pytest.raises(ConfigError, match=r"got .*; choose (dense, fixed|bidirectional, unidirectional)") as raised:
            resolved()
        assert isinstance(raised.value, NotImplementedError) and isinstance(raised.value, NotServed)
    with pytest.raises(ConfigError, match="2 problems") as raised:
        Config.resolve(settings(sparse_attention=section, train_batch_sise=3), data_ranks=1)
    assert not isinstance(raised.value, NotImplementedError)


@pytest.mark.parametrize("axis", [{"mesh": {"tensor": 2}}, {"tensor_parallel": {"autotp_size": 2}}])
def test_layouts_per_head_are_refused_where_heads_are_split(axis: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="different_layout_per_head: got true beside"):
        Config.resolve(settings(sparse_attention={"different_layout_per_head": True}, **axis), data_ranks=1)


PUBLISHED: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "none": (None, None),
    "empty": ({}, {"mode": "fixed", "block": 16, "different_layout_per_head": False, "num_local_blocks": 4,
                   "num_global_blocks": 1, "attention": "bidirectional", "horizontal_global_attention": False,
                   "num_different_global_patterns": 1}),
    "dense": ({"mode": "dense"}, {"mode": "dense"}),
    "bigbird": ({"mode": "bigbird", "block": 32, "attention": "unidirectional"},
                {"mode": "bigbird", "block": 32, "different_layout_per_head": False, "num_random_blocks": 0,
                 "num_sliding_window_blocks": 3, "num_global_blocks": 1}),
    "bslongformer": ({"mode": "bslongformer"},
                     {"mode": "bslongformer", "block": 16, "different_layout_per_head": False,
                      "num_sliding_window_blocks": 3, "global_block_indices": [0], "global_block_end_indices": None}),
    "variable": ({"mode": "variable", "local_window_blocks": [2, 4]},
                 {"mode": "variable", "block": 16, "different_layout_per_head": False, "num_random_blocks": 0,
                  "local_window_blocks": [2, 4], "global_block_indices": [0], "global_block_end_indices": None,
                  "attention": "bidirectional", "horizontal_global_attention": False}),
}  # fmt: skip


@pytest.mark.parametrize("case", PUBLISHED)
def test_scripts_read_the_published_values_and_the_engine_none(case: str) -> None:
    section, expected = PUBLISHED[case]
    given = {"train_batch_size": 1, "sparse_attention": section}
    assert DeepSpeedConfig(given).sparse_attention == expected
    assert "sparse_attention" not in tolerate(given)


def test_an_unknown_published_mode_is_a_notimplementederror() -> None:
    for mode in ("x", "local_sliding_window"):
        with pytest.raises(NotImplementedError, match=r"choose dense, fixed, variable, bigbird, bslongformer$"):
            DeepSpeedConfig({"train_batch_size": 1, "sparse_attention": {"mode": mode}})
