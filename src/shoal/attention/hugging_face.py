"""Models of Hugging Face transformers take block-sparse attention by the library's own interfaces, without a change of code.

    register({"mode": "bigbird", "block": 64})                      then attn_implementation="shoal_sparse" anywhere
    use_sparse_attention(model, BigBirdSparsityConfig(12, 64))      for a model that is there

Two functions are registered under one name: the attention, and its mask, which stays (batch, length) where it only says
what is padding. Sequences are padded to the block within, and the result is cut. A causal model sees no later position.

| a call | what computes it |
|---|---|
| as many queries as keys | `attend` with the layout of the padded length; dense where the structure needs a longer one |
| a mask that is not of padding alone (packed sequences, sliding windows, one of the caller) | `attend`, the mask as a bias |
| generation over a cache: fewer queries than keys | dense over the cache, restricted to the layout's rows of these queries |
| cross attention, and a prefix before an encoder's sequence | refused: a layout is of one sequence |

A mask of four dims is over all positions (batch, 1, queries, positions). The keys are the last of them: a cache that slides
with a window has dropped the others. The last query sees its own key, and no query a later one: they say which rows of the
layout the queries have.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from itertools import count
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.attention.attend import Backend, attend
from shoal.attention.blocks import Blocks
from shoal.attention.call import HIDES
from shoal.attention.settings import SparseAttentionSettings, sparsity_config
from shoal.attention.sparsity import SparsityConfig
from shoal.device import HOST
from shoal.errors import NotServed, UsageError
from shoal.log import warn_once

__all__ = ["NAME", "Sparsity", "Structures", "TakesAttention", "attend_cached", "attend_whole", "check_continues",
           "check_model", "check_served", "models_in", "register", "register_attention", "sparse_attention_in",
           "use_sparse_attention"]

NAME = "shoal_sparse"
_numbers = count(1)

Sparsity = SparsityConfig | SparseAttentionSettings | Mapping[str, Any]
"""A structure, or the JSON section that names one for any number of heads."""


@runtime_checkable
class TakesAttention(Protocol):
    """A model of Hugging Face transformers."""

    config: Any

    def set_attn_implementation(self, attn_implementation: Any) -> None: ...


def register(sparsity: Sparsity, *, name: str = NAME, backend: Backend = "auto", tensor_rank: int = 0) -> None:
    """Give transformers the attention `name`, of structure `sparsity`; a name that is there changes its structure.

    `tensor_rank` counts ranks that have other heads, which drop other probabilities.
    Raises ConfigError or NotServed for a wrong section, UsageError where transformers is not installed.
    """
    structure = Structures(sparsity)

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                  dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
                  position_bias: Tensor | None = None, **others: Any) -> tuple[Tensor, None]:
        check_served(NAME, module, others)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        of_heads = structure.of(query.shape[1])
        operands = query, key, value
        slid = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[-1] > key.shape[2]
        if query.shape[2] == key.shape[2] and not slid:
            output = attend_whole(of_heads, *operands, attention_mask, position_bias, causal=causal, dropout=dropout,
                                  scale=scaling, backend=backend, first_head=tensor_rank * query.shape[1])
        else:
            check_continues(NAME, module, query, key, causal=causal)
            output = attend_cached(of_heads, *operands, attention_mask, position_bias, causal=causal, dropout=dropout,
                                   scale=scaling)
        return output.transpose(1, 2).contiguous(), None

    register_attention(name, attention, _mask)


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Give transformers `attention` and its `mask` under `name`.

    Raises UsageError where transformers is not installed, or older than the lengths that it gives to masks.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__, masking_utils
    except ImportError as error:
        raise UsageError(f"{name}: the package transformers is not installed, or too old for it ({error}); install "
                         f"transformers>=5.4") from None
    if "q_length" not in signature(masking_utils.sdpa_mask).parameters:
        raise UsageError(f"{name}: got transformers {__version__}, whose masks are made in another way; install "
                         f"transformers>=5.4")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def use_sparse_attention(model: object, sparsity: Sparsity, *, backend: Backend = "auto", tensor_rank: int = 0) -> None:
    """Let the attention of a Hugging Face `model` be block-sparse; weights and their names stay.

    `tensor_rank` counts ranks that have other heads, which drop other probabilities.
    Raises UsageError for other models, and for those whose attention is not taken by the interface of transformers.
    """
    if not isinstance(model, TakesAttention):
        raise UsageError(f"use_sparse_attention: {type(model).__name__} is no model of Hugging Face transformers; build its "
                         f"layers with shoal.attention.attend or SparseSelfAttention")
    name = f"{NAME}_{next(_numbers)}"
    register(sparsity, name=name, backend=backend, tensor_rank=tensor_rank)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise NotServed(f"use_sparse_attention: {type(model).__name__} computes its attention by itself, not by the "
                        f"attention interface of transformers; take a model whose attn_implementation can be set")
    check_model(NAME, model)


@contextmanager
def sparse_attention_in(model: nn.Module, settings: SparseAttentionSettings, *, tensor_rank: int) -> Generator[None]:
    """Give the structure of `settings` to the Hugging Face models in `model`; take it back if the context raises.

    Settings without a mode change nothing. Warns where `model` has no such model: its script builds the attention.
    """
    found = [] if settings.mode is None else [*models_in(model)]
    before = [(each, each.config._attn_implementation) for each in found]
    if settings.mode is not None and not found:
        warn_once(f"sparse_attention: {type(model).__name__} has no model of Hugging Face transformers in it, and nothing "
                  f"is replaced: its script builds the attention, with shoal.attention.sparsity_config(section, heads)")
    try:
        for each in found:
            use_sparse_attention(each, settings, tensor_rank=tensor_rank)
        yield
    except BaseException:
        for each, name in before:
            each.set_attn_implementation(name)
        raise


def models_in(module: nn.Module) -> Iterator[TakesAttention]:
    """Yield the Hugging Face models in `module` that lie in no other."""
    if isinstance(module, TakesAttention):
        yield module
    else:
        for child in module.children():
            yield from models_in(child)


class Structures:
    """The structure of each number of heads."""

    def __init__(self, sparsity: Sparsity):
        self._given = sparsity
        self._by_heads: dict[int, SparsityConfig] = {}
        if not isinstance(sparsity, SparsityConfig):
            sparsity_config(sparsity, 1)  # raises for a wrong section, here and not in the first forward

    def of(self, heads: int) -> SparsityConfig:
        if isinstance(self._given, SparsityConfig):
            if self._given.different_layout_per_head and self._given.num_heads != heads:
                raise UsageError(f"{self._given!r}: the layouts are for {self._given.num_heads} heads, the model has "
                                 f"{heads}; give num_heads={heads}")
            return self._given
        if heads not in self._by_heads:
            self._by_heads[heads] = sparsity_config(self._given, heads)
        return self._by_heads[heads]


_NOT_COMPUTED = ("block_indices", "cache", "indices", "s_aux", "sinks", "softcap")
"""Arguments of attention functions that change its result: keys that the model chooses, sinks, a cap of scores."""


def check_served(name: str, module: nn.Module, others: Mapping[str, Any]) -> None:
    """Raise NotServed for what the attention `name` cannot compute."""
    for each in _NOT_COMPUTED:
        if others.get(each) is not None:
            raise NotServed(f"{name}: {type(module).__name__} gives {each}, which this attention does not compute; choose "
                            f"attn_implementation='eager' for this model")
    config = getattr(module, "config", None)
    declared = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
    if declared or getattr(module, "is_cross_attention", False) is True or "CrossAttention" in type(module).__name__:
        raise NotServed(f"{name}: {type(module).__name__} belongs to a model with cross attention, and a layout is of one "
                        f"sequence; choose attn_implementation='sdpa' for this model")
    if others.get("output_attentions"):
        warn_once(f"{name}: output_attentions has no effect: the probabilities are not kept; choose 'eager' to see them")


def check_model(name: str, model: object) -> None:
    """Raise NotServed for a Q-Former, whose cross attention no configuration declares and no module can be told by."""
    for path, _ in model.named_modules() if isinstance(model, nn.Module) else ():
        if path.rpartition(".")[2] == "crossattention":
            raise NotServed(f"{name}: {type(model).__name__} has cross attention ({path}), and a layout is of one sequence; "
                            f"choose attn_implementation='sdpa' for this model")


def check_continues(name: str, module: nn.Module, query: Tensor, key: Tensor, *, causal: bool) -> None:
    """Raise NotServed where the keys are not those of a cache that ends with the queries' own."""
    if not causal or query.shape[2] > key.shape[2]:
        raise NotServed(f"{name}: {type(module).__name__} has {query.shape[2]} queries and {key.shape[2]} keys, and is "
                        f"{'' if causal else 'not '}causal: cross attention or a prefix, and a layout is of one sequence; "
                        f"choose attn_implementation='sdpa' for this model")


def _mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
          mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None,
          **others: Any) -> Tensor | None:
    """Return the mask of a call: the padding (batch, length), or (batch, 1, length, kv_length).

    None without padding, as far as can be told without waiting for a device.
    """
    from transformers import masking_utils

    _check_mask(attention_mask)
    mask_function = mask_function or masking_utils.causal_mask_function
    plain = mask_function in (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if plain and q_length == kv_length and kv_offset == 0:
        if attention_mask is None:
            return None
        padding = F.pad(attention_mask[:, :kv_length], (0, max(kv_length - attention_mask.shape[1], 0)))
        return None if padding.device == HOST and bool(padding.all()) else padding  # elsewhere to look would wait
    if not plain and q_length == kv_length:
        warn_once(f"{NAME}: this model masks more than padding (packed sequences, or a sliding window of its own): a mask "
                  f"of length x length is made, whose memory grows with the square")
    others |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = masking_utils.sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_offset + kv_length,
                                   q_offset=q_offset, kv_offset=0, mask_function=mask_function,
                                   attention_mask=attention_mask, **others)
    if mask is None or q_length == mask.shape[-1]:
        return mask
    own = torch.arange(mask.shape[-1], device=mask.device) == q_offset + q_length - 1
    return torch.cat([mask[:, :, :-1], mask[:, :, -1:] | own], 2)  # by it `attend_cached` finds the rows: it may be padding


def _check_mask(mask: Tensor | None) -> None:
    """Raise UsageError for a mask that neither says what is padding nor what each query sees."""
    if mask is None or mask.dim() == 2 or (mask.dim() == 4 and (mask.dtype == torch.bool or mask.is_floating_point())):
        return
    raise UsageError(f"{NAME}: the mask is {tuple(mask.shape)} of {mask.dtype}; give (batch, length) of 0 and 1, or "
                     f"(batch, 1, queries, keys), either bool, True where a query sees a key, or float, added to the scores")


def attend_whole(structure: SparsityConfig, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                 bias: Tensor | None, *, causal: bool, dropout: float, scale: float | None, backend: Backend,
                 first_head: int) -> Tensor:
    """Return the attention of a sequence to itself: (batch, heads, length, dim). Raises UsageError for other masks."""
    _check_mask(mask)
    length, block = query.shape[2], structure.block
    missing = -length % block
    padded = length + missing
    blocks = (Blocks.dense(padded, padded, block) if padded < structure.shortest else
              structure.blocks(padded, causal=causal))
    causal = causal and (mask is None or mask.dim() == 2)  # one of four dims says so itself
    padding = None
    if mask is not None and mask.dim() == 2:
        padding = mask.to(torch.bool)
    elif mask is not None and mask.shape[1:3] == (1, 1) and not mask.requires_grad:  # alike for all heads and queries
        padding = mask[:, 0, 0].expand(query.shape[0], -1)
    elif mask is not None:
        added = _added(mask, query.dtype)
        bias = added if bias is None else bias + added
    bias = None if bias is None else bias.expand(*bias.shape[:-2], length, -1)
    if missing and padding is None and not causal:
        padding = torch.ones(query.shape[0], length, dtype=torch.bool, device=query.device)
    if missing:
        query, key, value = (F.pad(each, (0, 0, 0, missing)) for each in (query, key, value))
        if padding is not None:
            padding = F.pad(padding, (0, missing), value=False if padding.dtype == torch.bool else -torch.inf)
        bias = None if bias is None else F.pad(bias, (0, missing, 0, missing))
    output = attend(query, key, value, blocks, scale=scale, causal=causal, key_padding=padding, bias=bias, dropout=dropout,
                    first_head=first_head, backend=backend)
    return output[:, :, :length]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive bias of a mask (batch, heads or 1, length, kv_length)."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def attend_cached(structure: SparsityConfig | None, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                  bias: Tensor | None, *, causal: bool, dropout: float, scale: float | None) -> Tensor:
    """Return the attention of the last queries to a cache, dense but for the layout: (batch, heads, queries, dim).

    `mask` is of the positions, of which the keys are the last (batch, heads or 1, queries, positions), or says which of
    them are padding (batch, positions).
    """
    _check_mask(mask)
    queries, keys, device = query.shape[2], key.shape[2], query.device
    if mask is not None and mask.shape[-1] < keys:
        raise UsageError(f"{NAME}: the mask is {tuple(mask.shape)}, and there are {keys} keys; give a mask of "
                         f"({query.shape[0]}, {keys}) or ({query.shape[0]}, 1, {queries}, {keys})")
    length = keys if mask is None else mask.shape[-1]
    own = torch.arange(length - queries, length, device="cpu")
    if mask is None or mask.dim() == 2:
        numbers = torch.arange(length, device=device)
        seen = numbers <= own.to(device)[:, None] if causal else numbers.new_ones(queries, length, dtype=torch.bool)
        mask = seen if mask is None else seen & mask[:, None, None].to(torch.bool)
    elif structure is not None:  # a static cache has empty positions after the last query's own, which nobody sees
        anybody = (mask if mask.dtype == torch.bool else mask > HIDES).flatten(0, 2).any(0)
        empty = length - 1 - int((anybody * torch.arange(length, device=device)).max())
        own = (own - empty).clamp_(min=0)
    padded = 0 if structure is None else length + -length % structure.block
    if structure is not None and padded >= structure.shortest:
        rows = structure.blocks(padded, causal=causal).layout[:, own // structure.block]
        visible = rows.repeat_interleave(structure.block, -1)[None, :, :, :length].to(device)
        mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
    mask = mask[..., length - keys:]
    if bias is not None:
        mask = bias + _added(mask, query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale,
                                          enable_gqa=query.shape[1] != key.shape[1])
