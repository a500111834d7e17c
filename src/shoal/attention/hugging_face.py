"""Models of Hugging Face transformers take block-sparse attention by the library's own interfaces, without a change of code.

    register({"mode": "bigbird", "block": 64})                      then attn_implementation="shoal_sparse" anywhere
    use_sparse_attention(model, BigBirdSparsityConfig(12, 64))      for a model that is there

Two functions are registered under one name: the attention, and its mask, which stays (batch, length) where it only says
what is padding. Its dtype then says whether the model asked for a causal mask, which its modules may deny. Sequences are
padded to the block within, and the result is cut. A causal model sees no later position.

| a call | what computes it |
|---|---|
| as many queries as keys | `attend` with the layout of the padded length; dense where the structure needs a longer one |
| a mask that is not of padding alone (packed sequences, sliding windows, one of the caller) | `attend`, the mask as a bias |
| pieces of a prompt over a cache: more queries than a block | `attend` with the layout's rows of these queries |
| generation over a cache: at most a block of queries | dense over the keys of the blocks that the layout's rows visit |
| cross attention, and a prefix before an encoder's sequence | refused: a layout is of one sequence |

The mask says which rows of the layout the queries have. One of padding (batch, positions) ends with the last query: the keys
of a static cache after it are empty places. One of four dims is over all positions (batch, 1, queries, positions), of which
the keys are the last: a cache that slides with a window has dropped the others. There the last query sees its own key, and
no query a later one.

A model keeps its attention in its configuration, by a name of this process. A pickle has the structure in place of the name:
the process that loads it registers a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, Protocol, Self, TypeGuard
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.attention.attend import Backend, attend
from shoal.attention.blocks import Blocks
from shoal.attention.call import HIDES
from shoal.attention.served_models import check_continues, check_interface, check_model, check_served
from shoal.attention.settings import SparseAttentionSettings, sparsity_config
from shoal.attention.sparsity import SparsityConfig
from shoal.device import HOST
from shoal.errors import NotServed, UsageError
from shoal.log import warn_once

__all__ = ["NAME", "NameOfProcess", "Sparsity", "Structures", "TakesAttention", "attend_cached", "attend_whole",
           "attention_kept", "give_attention", "is_model", "models_in", "padding_mask", "read_mask", "register",
           "register_attention", "sparse_attention_in", "use_sparse_attention"]

NAME = "shoal_sparse"

Sparsity = SparsityConfig | SparseAttentionSettings | Mapping[str, Any]
"""A structure, or the JSON section that names one for any number of heads."""


class TakesAttention(Protocol):
    """A model of Hugging Face transformers."""

    config: Any

    def set_attn_implementation(self, attn_implementation: Any) -> None: ...


def is_model(module: object) -> TypeGuard[TakesAttention]:
    """Whether `module` itself is a model of Hugging Face transformers.

    Its class is asked: a wrapper, such as one of PEFT, passes on the attributes of the model within it.
    """
    return hasattr(type(module), "set_attn_implementation") and hasattr(module, "config")


class NameOfProcess(str):
    """The name under which an attention is registered in this process.

    No other process has it, so that a name never stands for another model's attention. A pickle has, in its place, the call
    that registers the attention where it is loaded: `again(*arguments)`, which returns the name there.
    """

    __slots__ = ("_again", "_arguments")

    def __new__(cls, prefix: str, again: Callable[..., NameOfProcess], *arguments: object) -> Self:
        """Draw a name that begins with `prefix`."""
        return super().__new__(cls, f"{prefix}_{uuid4().hex[:16]}")

    def __init__(self, prefix: str, again: Callable[..., NameOfProcess], *arguments: object):
        self._again, self._arguments = again, arguments

    def __reduce__(self) -> tuple[Callable[..., NameOfProcess], tuple[object, ...]]:
        return self._again, self._arguments

    def __deepcopy__(self, memo: object) -> Self:
        return self


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
        attention_mask, causal = read_mask(NAME, module, attention_mask, key.shape[2], is_causal=is_causal)
        of_heads = structure.of(query.shape[1])
        operands = query, key, value
        slid = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[-1] > key.shape[2]
        if query.shape[2] == key.shape[2] and not slid:
            output = attend_whole(of_heads, *operands, attention_mask, position_bias, causal=causal, dropout=dropout,
                                  scale=scaling, backend=backend, first_head=tensor_rank * query.shape[1])
        else:
            check_continues(NAME, module, query, key, causal=causal)
            output = attend_cached(of_heads, *operands, attention_mask, position_bias, causal=causal, dropout=dropout,
                                   scale=scaling, backend=backend, first_head=tensor_rank * query.shape[1])
        return output.transpose(1, 2).contiguous(), None

    register_attention(name, attention, _mask)
    _names.add(name)


_names: set[str] = set()
"""The names that `register` has given."""


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
    """Let the attention of a Hugging Face `model`, or of those in a module, be block-sparse; weights and their names stay.

    Copies and pickles of the model keep it. `save_pretrained` does not: transformers saves no attention implementation.
    `tensor_rank` counts ranks that have other heads, which drop other probabilities.
    Raises UsageError for other models, NotServed for those whose attention this one cannot be; they keep their own.
    """
    found = [*models_in(model)] if isinstance(model, nn.Module) else []
    if not found:
        raise UsageError(f"use_sparse_attention: {type(model).__name__} is no model of Hugging Face transformers, and has "
                         f"none in it; build its layers with shoal.attention.attend or SparseSelfAttention")
    name = _registered(dict(sparsity) if isinstance(sparsity, Mapping) else sparsity, backend, tensor_rank)
    with attention_kept(found):
        for each in found:
            give_attention("use_sparse_attention", each, name)


def give_attention(caller: str, model: TakesAttention, name: str) -> None:
    """Let `model` take the attention that is registered under `name`. Raises NotServed for one that cannot."""
    check_model(caller, model)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise NotServed(f"{caller}: {type(model).__name__} computes its attention by itself, not by the "
                        f"attention interface of transformers; take a model whose attn_implementation can be set")


@contextmanager
def attention_kept(models: Iterable[TakesAttention]) -> Generator[None]:
    """Give the models the attention back that they have now if the context raises."""
    before = [(each, each.config._attn_implementation) for each in models]
    try:
        yield
    except BaseException:
        for each, name in before:
            each.set_attn_implementation(name)
        raise


def _registered(sparsity: Sparsity, backend: Backend, tensor_rank: int) -> NameOfProcess:
    """Register the attention under a new name; also where a model is unpickled."""
    name = NameOfProcess(NAME, _registered, sparsity, backend, tensor_rank)
    register(sparsity, name=name, backend=backend, tensor_rank=tensor_rank)
    return name


@contextmanager
def sparse_attention_in(model: nn.Module, settings: SparseAttentionSettings, *, tensor_rank: int) -> Generator[None]:
    """Give the structure of `settings` to the Hugging Face models in `model`; take it back if the context raises.

    Settings without a mode change nothing; a model that has the attention by its name is checked all the same. Warns where
    `model` has no such model: its script builds the attention.
    """
    for each in models_in(model):
        if each.config._attn_implementation in _names:  # transformers takes a name for any model
            check_model(f"attn_implementation={str(each.config._attn_implementation)!r}", each)
    found = [] if settings.mode is None else [*models_in(model)]
    if settings.mode is not None and not found:
        warn_once(f"sparse_attention: {type(model).__name__} has no model of Hugging Face transformers in it, and nothing "
                  f"is replaced: its script builds the attention, with shoal.attention.sparsity_config(section, heads)")
    with attention_kept(found):
        for each in found:
            use_sparse_attention(each, settings, tensor_rank=tensor_rank)
        yield


def models_in(module: nn.Module) -> Iterator[TakesAttention]:
    """Yield the Hugging Face models in `module` that lie in no other."""
    if is_model(module):
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


_CAUSAL, _BIDIRECTIONAL = torch.int8, torch.uint8
"""The dtypes of a mask of padding that tell which mask a model asked for. No mask of transformers or a script has them."""


def padding_mask(given: Tensor | None, shape: tuple[int, int], device: Any, *, causal: bool) -> Tensor:
    """Return `given`, 0 where there is padding, as a mask (batch, positions) that says whether later keys are hidden.

    Without one it is 1 everywhere, in the memory of one element.
    """
    dtype = _CAUSAL if causal else _BIDIRECTIONAL
    return torch.ones((), dtype=dtype, device=device).expand(shape) if given is None else given.to(torch.bool).to(dtype)


def read_mask(name: str, module: nn.Module, mask: Tensor | None, keys: int, *,
              is_causal: bool | None) -> tuple[Tensor | None, bool]:
    """Return the mask of a call, None where it says nothing of `keys` keys, and whether `module` hides later ones.

    The mask tells, else the argument `is_causal` of the call, else the module. Raises NotServed where none does.
    """
    if mask is None or mask.dim() != 2 or mask.dtype not in (_CAUSAL, _BIDIRECTIONAL):
        return mask, _is_causal(name, module, mask) if is_causal is None else is_causal
    says_nothing = not any(mask.stride()) and mask.shape[1] == keys
    return None if says_nothing else mask.view(torch.bool), mask.dtype == _CAUSAL


def _is_causal(name: str, module: nn.Module, mask: Tensor | None) -> bool:
    """Return whether `module` hides later keys, which a mask of four dims says by itself.

    Raises NotServed where neither tells: such a model gives a mask of four dims to every other attention.
    """
    if (causal := getattr(module, "is_causal", None)) is not None:
        return causal
    if mask is None or mask.dim() != 4:
        raise NotServed(f"{name}: {type(module).__name__} does not say whether it is causal; set is_causal to True or False "
                        f"on the model's modules of this class, or choose attn_implementation='eager' for this model")
    return False


def _mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
          mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None,
          **others: Any) -> Tensor | None:
    """Return the mask of a call: the padding up to the last query (batch, positions), or (batch, 1, length, positions)."""
    from transformers import masking_utils

    check_interface(NAME, others.get("config"))
    _check_mask(attention_mask)
    mask_function = mask_function or masking_utils.causal_mask_function
    causal = mask_function is masking_utils.causal_mask_function
    whole = q_length == kv_length and (causal or mask_function is masking_utils.bidirectional_mask_function)
    if kv_offset == 0 and (whole or causal):
        end = kv_length if whole else int(q_offset) + q_length
        padding = None
        if attention_mask is not None:
            padding = F.pad(attention_mask[:, :end], (0, max(end - attention_mask.shape[1], 0)))
            looks = padding.device == HOST and not torch.compiler.is_compiling()  # else it would wait, or break a graph
            if looks and end == kv_length and bool(padding.all()):
                padding = None
        return padding_mask(padding, (batch_size, end), others.get("device"), causal=causal)
    if q_length > 1:
        warn_once(f"{NAME}: this model masks more than padding (packed sequences, a sliding window of its own, or position "
                  f"ids without an attention mask in torch.compile, which cannot see that nothing is packed: give the "
                  f"attention mask): a mask of length x length is made, whose memory grows with the square")
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
    return _attend_last(_blocks(structure, query.shape[2], causal=causal), query, key, value, mask, bias, dropped=0,
                        causal=causal, dropout=dropout, scale=scale, backend=backend, first_head=first_head)


def _blocks(structure: SparsityConfig, length: int, *, causal: bool) -> Blocks:
    """Return the blocks of the padded length; dense where the structure needs a longer one."""
    padded = length + -length % structure.block
    if padded < structure.shortest:
        return Blocks.dense(padded, padded, structure.block)
    return structure.blocks(padded, causal=causal)


def _attend_last(blocks: Blocks, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, *,
                 dropped: int, causal: bool, dropout: float, scale: float | None, backend: Backend,
                 first_head: int) -> Tensor:
    """Return the attention of the last positions of a sequence to all but the first `dropped`: (batch, heads, queries, dim).

    `mask` and `bias` are of these queries and keys. Queries begin in a block and end in one: both are padded.
    """
    block, queries = blocks.block, query.shape[2]
    end = dropped + key.shape[2]
    first = end - queries
    front, key_front, missing = first % block, dropped % block, -end % block
    blocks = blocks.part(range(first // block, blocks.row_blocks), range(dropped // block, blocks.column_blocks))
    causal = causal and (mask is None or mask.dim() == 2)  # one of four dims says so itself
    padding = None
    if mask is not None and mask.dim() == 2:
        padding = mask.to(torch.bool)
    elif mask is not None and mask.shape[1:3] == (1, 1) and not mask.requires_grad:  # alike for all heads and queries
        padding = mask[:, 0, 0].expand(query.shape[0], -1)
    elif mask is not None:
        added = _added(mask, query.dtype)
        bias = added if bias is None else bias + added
    bias = None if bias is None else bias.expand(*bias.shape[:-2], queries, -1)
    if padding is None and (key_front or (missing and not causal)):
        padding = torch.ones(query.shape[0], key.shape[2], dtype=torch.bool, device=query.device)
    if front or missing:
        query = F.pad(query, (0, 0, front, missing))
    if key_front or missing:
        key, value = (F.pad(each, (0, 0, key_front, missing)) for each in (key, value))
        if padding is not None:
            padding = F.pad(padding, (key_front, missing), value=False if padding.dtype == torch.bool else -torch.inf)
    if bias is not None and (front or key_front or missing):
        bias = F.pad(bias, (key_front, missing, front, missing))
    output = attend(query, key, value, blocks, scale=scale, causal=causal, key_padding=padding, bias=bias, dropout=dropout,
                    first_head=first_head, backend=backend)
    return output[:, :, front:front + queries]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive bias of a mask (batch, heads or 1, length, kv_length)."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def attend_cached(structure: SparsityConfig | None, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
                  bias: Tensor | None, *, causal: bool, dropout: float, scale: float | None, backend: Backend,
                  first_head: int) -> Tensor:
    """Return the attention of the last queries to a cache, dense without a structure: (batch, heads, queries, dim).

    `mask` says which positions up to the last query's own are padding (batch, positions); or it is of all positions, of
    which the keys are the last (batch, heads or 1, queries, positions).
    """
    _check_mask(mask)
    queries, keys = query.shape[2], key.shape[2]
    positions = keys if mask is None else mask.shape[-1]
    if mask is not None and positions < (keys if mask.dim() == 4 else queries):
        raise UsageError(f"{NAME}: the mask is {tuple(mask.shape)}, and there are {keys} keys; give a mask of "
                         f"({query.shape[0]}, {keys}) or ({query.shape[0]}, 1, {queries}, {keys})")
    dropped = max(positions - keys, 0)
    end = positions
    if mask is not None and mask.dim() == 4 and structure is not None:
        seen = (mask if mask.dtype == torch.bool else mask > HIDES).flatten(0, 2).any(0)
        last = int((seen * torch.arange(positions, device=seen.device)).max())
        end = max(last + 1, dropped + queries)  # after it are the empty places of a static cache
    if end - dropped < keys:
        key, value = key[:, :, :end - dropped], value[:, :, :end - dropped]
        bias = None if bias is None else bias[..., :end - dropped]
    mask = None if mask is None else mask[..., dropped:end]
    blocks = None if structure is None else _blocks(structure, end, causal=causal)
    if blocks is not None and queries > blocks.block:
        return _attend_last(blocks, query, key, value, mask, bias, dropped=dropped, causal=causal, dropout=dropout,
                            scale=scale, backend=backend, first_head=first_head)
    numbers = torch.arange(dropped, end, device="cpu")
    own = numbers[-queries:, None]
    seen = (numbers <= own if causal and (mask is None or mask.dim() == 2) else own >= 0)[None, None]
    if blocks is not None:
        first, last = int(own[0]) // blocks.block, int(own[-1]) // blocks.block
        rows = blocks.layout_of_rows(range(first, last + 1))[:, own[:, 0] // blocks.block - first]  # heads, queries, blocks
        chosen = numbers[rows.flatten(0, 1).any(0)[numbers // blocks.block]]
        seen = seen.expand(-1, -1, -1, len(numbers))[..., chosen - dropped] & rows[..., chosen // blocks.block]
        if len(chosen) < len(numbers):
            index = (chosen - dropped).to(query.device)
            key, value = key.index_select(2, index), value.index_select(2, index)
            mask = None if mask is None else mask[..., index]
            bias = None if bias is None else bias[..., index]
    seen = seen.to(query.device)
    if mask is None:
        mask = seen
    elif mask.dim() == 2:
        mask = seen & mask[:, None, None].to(torch.bool)
    else:
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)
    if bias is not None:
        mask = bias + _added(mask, query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale,
                                          enable_gqa=query.shape[1] != key.shape[1])
