"""`SparseSelfAttention` is `attend` as a module, under the published names and conventions; any dtype that `attend` takes.

The layout of the longest sequence is drawn once and is a buffer, so that it is saved and loaded with the model; a shorter
sequence has its upper left part. The visited blocks are cached by the part, and made again where the buffer changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.attention.arguments import check_tensor, whole_number
from shoal.attention.attend import attend
from shoal.attention.blocks import Blocks
from shoal.attention.masks import Mode
from shoal.attention.sparsity import SparsityConfig
from shoal.attention.structures import FixedSparsityConfig
from shoal.errors import ConfigError, NotServed, UsageError

__all__ = ["BertSparseSelfAttention", "SparseSelfAttention", "value_of"]

_NO_STRUCTURE = SparsityConfig(num_heads=4)
_FIXED = FixedSparsityConfig(num_heads=4)


class SparseSelfAttention(nn.Module):
    """Attention of a sequence to itself over the blocks that `sparsity_config` visits, scaled by 1 / sqrt(head dim).

    The modes say whether masks are added to scores ("add"), or hide keys where they are 0 ("mul"). Raises ConfigError for
    another mode, or for a `max_seq_length` that is no multiple of the block.
    """

    master_layout: Tensor

    def __init__(self, sparsity_config: SparsityConfig = _NO_STRUCTURE, key_padding_mask_mode: Mode = "add",
                 attn_mask_mode: Mode = "mul", max_seq_length: int = 2048):
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in ("add", "mul"):
                raise ConfigError(f"SparseSelfAttention: {name}: got {mode!r}; choose 'add' or 'mul'")
        _check_structure("SparseSelfAttention", sparsity_config)
        self.sparsity_config = sparsity_config
        self.key_padding_mask_mode: Mode = key_padding_mask_mode
        self.attn_mask_mode: Mode = attn_mask_mode
        self.max_seq_length = max_seq_length
        self.dropout = 0.0
        """The probability with which a weight is dropped in training."""
        self.register_buffer("master_layout", sparsity_config.layout_of_heads(max_seq_length))
        self._blocks: dict[int, Blocks] = {}
        self._seen: tuple[Tensor, int] = (self.master_layout, _version(self.master_layout))

    def get_layout(self, L: int) -> Tensor:
        """Return the layout (heads, blocks, blocks) of a sequence of `L` positions: a part of `master_layout`.

        Raises ConfigError for a length that is no multiple of the block, or above `max_seq_length`.
        """
        block = self.sparsity_config.block
        length = whole_number("SparseSelfAttention: a length", L, error=ConfigError)
        if length < 1 or length % block:
            raise ConfigError(f"SparseSelfAttention: got length {length}, which is no multiple of the block, {block}; pad "
                              f"it by {-length % block} (SparseAttentionUtils.pad_to_block_size)")
        if self.max_seq_length < length:
            raise ConfigError(f"SparseSelfAttention: got length {length}, the layout is for at most {self.max_seq_length}; "
                              f"give max_seq_length={length}")
        return self.master_layout[:, :length // block, :length // block]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, rpe: Tensor | None = None,
                key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
        """Return the attention (batch, heads, length, head dim) of `query`, `key` and `value`, which have that shape.

        `key` may be (batch, heads, head dim, length) too. `rpe` is added to the scores: (length, length), or with heads and
        batches before. `key_padding_mask` is (batch, length), with any dims of 1 between; `attn_mask` (length, length),
        with any dims of 1 before.

        Raises NotServed (a NotImplementedError) for different lengths of query, key and value, UsageError for other shapes.
        """
        for name, operand in (("query", query), ("key", key), ("value", value)):
            check_tensor(f"SparseSelfAttention: {name}", operand, "(batch, heads, length, head dim)")
        if query.dim() == 4 and key.shape != query.shape and key.shape[-2:] == query.shape[:1:-1]:
            key = key.transpose(-1, -2)
        if query.shape != key.shape or key.shape != value.shape:
            raise NotServed(f"SparseSelfAttention: query, key and value have one shape; got {tuple(query.shape)}, "
                            f"{tuple(key.shape)} and {tuple(value.shape)}. For others use shoal.attention.attend")
        heads = self.master_layout.shape[0]
        if query.dim() != 4:
            raise UsageError(f"SparseSelfAttention: operands are (batch, heads, length, head dim); got "
                             f"{tuple(query.shape)}: give all four dims")
        if query.shape[1] != heads:
            raise UsageError(f"SparseSelfAttention: the layout is for {heads} heads, and query has {query.shape[1]} in "
                             f"{tuple(query.shape)}: give the sparsity configuration num_heads={query.shape[1]}")
        length = query.shape[2]
        blocks = self._blocks_of(length)
        return attend(query, key, value, blocks, bias=rpe,
                      key_padding=_squeezed("key_padding_mask", key_padding_mask, (query.shape[0], length)),
                      key_padding_mode=self.key_padding_mask_mode,
                      mask=_squeezed("attn_mask", attn_mask, (length, length)), mask_mode=self.attn_mask_mode,
                      dropout=self.dropout if self.training else 0.0)

    def _blocks_of(self, length: int) -> Blocks:
        layout, version = self._seen
        if layout is not self.master_layout or version != _version(self.master_layout):
            self._blocks = {}
            self._seen = (self.master_layout, _version(self.master_layout))
        if length not in self._blocks:
            self._blocks[length] = Blocks.of(self.get_layout(length), self.sparsity_config.block)
        return self._blocks[length]


def _version(layout: Tensor) -> int:
    return 0 if layout.is_inference() else layout._version  # a tensor of inference mode counts no writes


def _check_structure(name: str, structure: object) -> None:
    if not isinstance(structure, SparsityConfig):
        raise ConfigError(f"{name}: sparsity_config: got {type(structure).__name__}; give a structure, such as "
                          f"FixedSparsityConfig(num_heads=4), or of a JSON section shoal.attention.sparsity_config(section, "
                          f"heads)")


def _squeezed(name: str, mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Return a mask without its dims of 1; raise UsageError where it then has another shape than this."""
    if mask is None:
        return None
    check_tensor(f"SparseSelfAttention: {name}", mask, "of bool, whole or float numbers")
    first = 0 if name == "key_padding_mask" else -2
    if mask.dim() < 2 or (mask.shape[first], mask.shape[-1]) != shape or mask.numel() != shape[0] * shape[1]:
        meaning = "(batch, length) or (batch, 1, 1, length)" if first == 0 else "(length, length) or (1, 1, length, length)"
        raise UsageError(f"SparseSelfAttention: {name}: got {tuple(mask.shape)}; give {meaning}, here {shape}")
    return mask.reshape(shape)


class BertSparseSelfAttention(nn.Module):
    """The self attention of BERT with block-sparse scores: `query`, `key` and `value` project, and heads are put together.

    `config` has `hidden_size`, `num_attention_heads`, and may have `attention_probs_dropout_prob` and, if sequences are
    longer than 2,048, `max_position_embeddings`.
    Raises ConfigError for a hidden size that the heads do not divide.
    """

    def __init__(self, config: Any, sparsity_config: SparsityConfig = _FIXED):
        super().__init__()
        hidden, heads = (_size_of(config, name) for name in ("hidden_size", "num_attention_heads"))
        _check_structure("BertSparseSelfAttention", sparsity_config)
        if hidden % heads:
            raise ConfigError(f"BertSparseSelfAttention: hidden_size: got {hidden}, no multiple of the {heads} attention "
                              f"heads; give {hidden + -hidden % heads}")
        self.num_attention_heads, self.attention_head_size, self.all_head_size = heads, hidden // heads, hidden
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        block = sparsity_config.block
        longest = max(2048, value_of(config, "max_position_embeddings", 0))
        self.sparse_self_attention = SparseSelfAttention(sparsity_config, max_seq_length=longest + -longest % block)
        self.sparse_self_attention.dropout = value_of(config, "attention_probs_dropout_prob", 0.0)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the context (batch, length, hidden) of `hidden_states`, of that shape.

        `attention_mask` says what is padding: (batch, length), (batch, 1, 1, length) or equal for all queries in
        (batch, 1, length, length). It is added to the scores; one of dtype bool hides where it is False. Raises UsageError
        for a mask whose queries see different keys, such as a causal one.
        """
        check_tensor("BertSparseSelfAttention: hidden_states", hidden_states, "(batch, length, hidden)")
        query, key, value = (self.transpose_for_scores(each(hidden_states)) for each in (self.query, self.key, self.value))
        if attention_mask is not None:
            check_tensor("BertSparseSelfAttention: attention_mask", attention_mask, "of padding, (batch, length)")
            if attention_mask.dim() == 4:
                attention_mask = _of_keys(attention_mask).expand(len(query), -1)
        context = self.sparse_self_attention(query, key, value, key_padding_mask=attention_mask)
        return context.transpose(1, 2).flatten(2)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """Return (batch, heads, length, head dim) of (batch, length, hidden)."""
        return x.unflatten(-1, (self.num_attention_heads, self.attention_head_size)).transpose(1, 2)


def value_of(config: Any, name: str, default: Any) -> Any:
    """Return the value `name` of a model's configuration, an object of any class with attributes; else `default`."""
    try:
        return getattr(config, name)
    except (AttributeError, KeyError):  # a dict whose attributes are its items raises KeyError
        return default


def _size_of(config: Any, name: str) -> int:
    """Return a size that a model's configuration says. Raises ConfigError where it says none."""
    return whole_number(f"BertSparseSelfAttention: {name} of config, an object such as a BertConfig of transformers,",
                        value_of(config, name, None), "a whole number from 1", least=1, error=ConfigError)


def _of_keys(mask: Tensor) -> Tensor:
    """Return the mask of keys (batch, length) that (batch, 1, 1 or length, length) gives to every query."""
    last = mask[:, :1, -1:]
    same = all(mask.shape[dim] == 1 or mask.stride(dim) == 0 for dim in (1, 2))  # else it waits for a device
    if not same and not torch.equal(mask, last.expand_as(mask)):
        raise UsageError(f"BertSparseSelfAttention: attention_mask: got {tuple(mask.shape)}, whose queries see different "
                         f"keys; it says what is padding: give (batch, 1, 1, length). For causal models, and packed "
                         f"sequences, use shoal.attention.use_sparse_attention, or SparseSelfAttention with attn_mask")
    return last[:, 0, 0]
