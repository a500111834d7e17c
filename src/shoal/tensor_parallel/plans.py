"""Plans for models of Hugging Face transformers, by the `model_type` of their configuration.

They are written for transformers 5 and tested with it; this module imports nothing of that library. Classification heads and
other modules outside of the blocks stay whole. With `sequence_parallel` tensors are split along the sequence from the first
block's input to the last norm's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import nn

from shoal.config.problem import nearest
from shoal.errors import UsageError
from shoal.tensor_parallel.plan import Plan, matches
from shoal.tensor_parallel.plan_rules import (
    Column,
    Dropout,
    Head,
    Heads,
    Kind,
    Norm,
    Region,
    Row,
    Sequence,
    Vocabulary,
    Whole,
)

__all__ = ["PLANS", "plan_for"]

_SEQUENCE_DIM = 1  # dim 0 is the batch


@runtime_checkable
class _Configured(Protocol):
    """A model of Hugging Face transformers."""

    config: Any
    base_model_prefix: str


def plan_for(model: nn.Module, *, sequence_parallel: bool = False) -> Plan:
    """Return the plan for the class of `model`. Raises `UsageError` if there is none."""
    known = ", ".join(sorted(PLANS))
    if not isinstance(model, _Configured):
        raise UsageError(f"parallelize: {type(model).__name__} is no model of Hugging Face transformers; give it a plan: "
                         f"Plan({{name pattern: kind}}), as docs/tensor_parallel.md shows")
    model_type: str = model.config.model_type
    if model_type not in PLANS:
        close = nearest(model_type, PLANS)
        like = "" if close is None else (f" If it is built like {close}, use that one: "
                                         f"shoal.tensor_parallel.plans.{PLANS[close].__name__}(model).")
        raise UsageError(f"parallelize: there is no plan for models of type {model_type!r}; there are plans for {known}."
                         f"{like} Write one: Plan({{name pattern: kind}}), as docs/tensor_parallel.md shows")
    return PLANS[model_type](model, sequence_parallel=sequence_parallel)


def gpt2(model: Any, *, sequence_parallel: bool = False) -> Plan:
    """Return the plan for GPT-2, whose linear layers are Conv1D: the weight is (inputs, outputs)."""
    config = model.config
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    attention = Region(divide=("num_heads", "split_size"), dropout=config.attn_pdrop > 0)
    kinds: dict[str, Kind] = {
        "wte": Vocabulary(),
        "lm_head": Head(),
        "h.0": Sequence(split="hidden_states"),
        "h.*.ln_1|ln_2": Norm(),
        "h.*.attn": attention,
        "h.*.attn.c_attn": Heads(heads=heads, head_dim=dim, input_first=True),
        "h.*.attn.c_proj": Row(input_first=True),
        "h.*.attn.resid_dropout": Dropout(),
        "h.*.mlp.c_fc": Column(input_first=True),
        "h.*.mlp.c_proj": Row(input_first=True),
        "h.*.mlp.dropout": Dropout(),
        "ln_f": Norm(gather_output=True),
    }
    if config.add_cross_attention:
        _refuse_cross_attention(sequence_parallel)
        kinds |= {
            "h.*.crossattention": attention,
            "h.*.crossattention.q_attn": Column(heads=heads, input_first=True),
            "h.*.crossattention.c_attn": Column(heads=heads, parts=(heads * dim,) * 2, input_first=True),
            "h.*.crossattention.c_proj": Row(input_first=True),
        }
    return _plan(model, kinds, sequence_parallel=sequence_parallel, optional=("lm_head",))


def llama(model: Any, *, sequence_parallel: bool = False) -> Plan:
    """Return the plan for Llama and models of the same structure: Mistral, Qwen2 (biases), Qwen3 (norms of heads)."""
    config = model.config
    shared = Column(heads=config.num_key_value_heads)
    kinds: dict[str, Kind] = {
        "embed_tokens": Vocabulary(),
        "lm_head": Head(),
        "layers.0": Sequence(split="hidden_states"),
        "layers.*.input_layernorm|post_attention_layernorm": Norm(),
        "layers.*.self_attn": Region(enter="hidden_states", dropout=config.attention_dropout > 0),
        "layers.*.self_attn.q_proj": Column(heads=config.num_attention_heads),
        "layers.*.self_attn.k_proj|v_proj": shared,
        "layers.*.self_attn.q_norm|k_norm": Norm(per_head=True),
        "layers.*.self_attn.o_proj": Row(),
        "layers.*.mlp": Region(enter="x"),
        "layers.*.mlp.gate_proj|up_proj": Column(),
        "layers.*.mlp.down_proj": Row(),
        "norm": Norm(gather_output=True),
    }
    optional = ("lm_head",) if config.model_type == "qwen3" else ("lm_head", "layers.*.self_attn.q_norm|k_norm")
    return _plan(model, kinds, sequence_parallel=sequence_parallel, optional=optional)


def bert(model: Any, *, sequence_parallel: bool = False) -> Plan:
    """Return the plan for BERT, which has post-norm blocks."""
    config = model.config
    heads, last = config.num_attention_heads, config.num_hidden_layers - 1
    attentions = ("attention", "crossattention") if config.add_cross_attention else ("attention",)
    ends: dict[str, Kind] = {"encoder.layer.0": Sequence(split="hidden_states", gather_output=last == 0)}
    if last > 0:
        ends[f"encoder.layer.{last}"] = Sequence(gather_output=True)
    kinds: dict[str, Kind] = {
        "embeddings.word_embeddings": Vocabulary(),
        **ends,
        "layer.*.intermediate.dense": Column(),
        "layer.*.output.dense": Row(),
        "layer.*.output.dropout": Dropout(),
        "layer.*.output.LayerNorm": Norm(),
        "cls.predictions": Whole(follows=("bias",)),
        "cls.predictions.decoder": Head(),
    }
    for name in attentions:
        entered = "hidden_states" if name == "attention" else None  # cross attention gets keys and values from the encoder
        kinds |= {
            f"layer.*.{name}.self": Region(divide=("num_attention_heads", "all_head_size"), enter=entered,
                                           dropout=config.attention_probs_dropout_prob > 0),
            f"layer.*.{name}.self.query|key|value": Column(heads=heads),
            f"layer.*.{name}.output.dense": Row(),
            f"layer.*.{name}.output.dropout": Dropout(),
            f"layer.*.{name}.output.LayerNorm": Norm(),
        }
    if config.add_cross_attention:
        _refuse_cross_attention(sequence_parallel)
    return _plan(model, kinds, sequence_parallel=sequence_parallel, optional=("cls.predictions", "cls.predictions.decoder"))


PLANS: dict[str, Callable[..., Plan]] = {
    "bert": bert, "gpt2": gpt2, "llama": llama, "mistral": llama, "qwen2": llama, "qwen3": llama,
}
"""Plans by model type: each is a function of the model and `sequence_parallel`."""


def _plan(model: nn.Module, kinds: dict[str, Kind], *, sequence_parallel: bool, optional: tuple[str, ...]) -> Plan:
    """Return a plan of `kinds`, without those `optional` patterns that match no module of the model."""
    paths = [path for path, _ in model.named_modules()]
    absent = {pattern for pattern in optional if not any(matches(pattern, path) for path in paths)}
    return Plan({pattern: kind for pattern, kind in kinds.items() if pattern not in absent},
                sequence_dim=_SEQUENCE_DIM if sequence_parallel else None)


def _refuse_cross_attention(sequence_parallel: bool) -> None:
    if sequence_parallel:
        raise UsageError("parallelize: sequence_parallel with cross attention is not supported: the encoder's sequence is "
                         "not split; leave sequence_parallel out")
