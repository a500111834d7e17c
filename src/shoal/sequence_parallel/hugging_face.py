"""Models of Hugging Face transformers on a sequence axis, by the library's own interfaces, without a change of code.

    use_sequence_attention(model, axis)                       dense attention over whole sequences
    use_sequence_attention(model, axis, BigBirdSparsityConfig(12, 64))

The model is given parts of sequences, as `split_batch` makes them, with the position ids of the whole. Its mask stays a part
(batch, n) until the first layer joins it. The loss of a language model that transformers computes by its `loss_function` is
that of the whole sequence; other losses are of the part, with a warning. A model to which a script has given this attention
already keeps what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from shoal.attention.attend import Backend
from shoal.attention.blocks import Blocks
from shoal.attention.hugging_face import (
    NameOfProcess,
    Sparsity,
    Structures,
    TakesAttention,
    attend_cached,
    attend_whole,
    attention_kept,
    give_attention,
    is_model,
    models_in,
    padding_mask,
    read_mask,
    register_attention,
)
from shoal.attention.served_models import check_continues, check_interface, check_served
from shoal.attention.settings import SparseAttentionSettings
from shoal.errors import NotServed, UsageError
from shoal.log import warn_once
from shoal.sequence_parallel.attention import Exchange, attend_sequence
from shoal.sequence_parallel.axis import SequenceAxis
from shoal.sequence_parallel.loss import SequenceLoss
from shoal.sequence_parallel.split import Positions

__all__ = ["SequenceAttention", "padding_of", "register_sequence_attention", "sequence_attention_in",
           "use_sequence_attention"]

_NAME = "shoal_sequence"
_POOLING = ("ForMultipleChoice", "ForNextSentencePrediction", "ForSequenceClassification")
"""Ends of the names of models whose head reads one position."""
_ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "window_attention", "attention",
                              "indexed_attention", "reference_sliding_attention", "moe", "dense", "sparse"})
"""Kinds of layers in transformers' configurations that read other positions by attention alone, if at all."""


def use_sequence_attention(model: object, axis: SequenceAxis, sparsity: Sparsity | None = None, *,
                           exchange: Exchange = "auto", backend: Backend = "auto", tensor_rank: int = 0,
                           split_in_eval: bool = True, whole_loss: bool = True) -> None:
    """Let the attention of a Hugging Face `model`, or of those in a module, be over sequences that ranks have parts of.

    `sparsity` is the structure of the whole sequence, dense without it. `tensor_rank` counts ranks that have other heads.
    `split_in_eval` False: modules in eval mode are given whole sequences, and generate over a cache. `whole_loss` False:
    the loss that the model computes stays that of its part, for scripts that join it.
    Raises UsageError for other models, NotServed for those whose attention this one cannot be; they keep their own.
    """
    found = [*models_in(model)] if isinstance(model, nn.Module) else []
    if not found:
        raise UsageError(f"use_sequence_attention: {type(model).__name__} is no model of Hugging Face transformers, and has "
                         f"none in it; build its layers with shoal.sequence_parallel.attend_sequence")
    for each in found:
        if type(each).__name__.endswith(_POOLING):
            raise NotServed(f"use_sequence_attention: {type(each).__name__} pools one position of the sequence, which one "
                            f"rank has; split the model without its head, and compute the loss on the rank that has the "
                            f"position")
        _check_positions(each)
    name = NameOfProcess(_NAME, _refused)
    register_sequence_attention(name, SequenceAttention(
        axis, None if sparsity is None else Structures(sparsity), exchange=exchange, backend=backend,
        tensor_rank=tensor_rank, split_in_eval=split_in_eval))
    with attention_kept(found):
        for each in found:
            give_attention("use_sequence_attention", each, name)
            _check_position_ids(each)
            if whole_loss:
                _set_loss(each, axis)


def _check_positions(model: Any) -> None:
    """Raise NotServed for a model that mixes positions outside of its attention: a rank has a part of them alone."""
    mixed = next((f"{path}, {type(module).__name__}" for path, module in model.named_modules() if _mixes(module)), "")
    kinds = {kind for config in _configs(model.config) for kind in getattr(config, "layer_types", None) or ()}
    for kind in sorted(kinds - _ATTENTION_KINDS):
        mixed = mixed or f"layers of the kind {kind}"
    if getattr(model.config, "trigram_input", False):
        mixed = mixed or "trigram_input, which reads the embeddings of both neighbours"
    if mixed:
        raise NotServed(f"use_sequence_attention: {type(model).__name__} mixes positions outside of its attention "
                        f"({mixed}), and a rank has only a part of them; train it without a sequence axis")


def _check_position_ids(model: Any) -> None:
    """Raise NotServed for a model that counts positions by itself, unless its attention refuses its bias of positions."""
    models: list[Any] = [each for each in model.modules() if is_model(each)]
    if any("position_ids" in signature(each.forward).parameters for each in models):
        return
    if not any(path.endswith("relative_attention_bias") for path, _ in model.named_modules()):
        raise NotServed(f"use_sequence_attention: {type(model).__name__} takes no position_ids, so that each rank would "
                        f"count the positions of its part from 0; train it without a sequence axis")


def _mixes(module: nn.Module) -> bool:
    """Whether a layer reads other positions than it writes."""
    if isinstance(module, (nn.Conv1d, nn.AvgPool1d, nn.MaxPool1d)):
        size: int | tuple[int, ...] = module.kernel_size
        return (max(size) if isinstance(size, tuple) else size) > 1
    return isinstance(module, nn.RNNBase)


def _configs(config: Any) -> tuple[Any, ...]:
    """Return a configuration and those of the models within it."""
    return config, *(each for name in config.sub_configs if (each := getattr(config, name, None)) is not None)


def padding_of(module: nn.Module) -> tuple[int, Positions]:
    """Return the id of the padding token of a Hugging Face model in `module`, and how it counts positions; else (0, "all").

    RoBERTa and the models that follow it make position ids of their tokens, by a method of their embeddings.
    """
    model = next(models_in(module), None)
    token = None if model is None else getattr(model.config, "pad_token_id", None)
    counts_tokens = any(hasattr(each, "create_position_ids_from_inputs_embeds") for each in module.modules())
    return (token, "tokens" if counts_tokens else "all") if isinstance(token, int) else (0, "all")


def register_sequence_attention(name: str, attention: SequenceAttention) -> None:
    """Give transformers `attention` under `name`, for every model whose `attn_implementation` that is."""
    register_attention(name, attention, _mask)


def _refused() -> NameOfProcess:
    """Register an attention that raises, for a model that is unpickled: a pickle contains no process group."""
    name = NameOfProcess(_NAME, _refused)
    register_attention(name, _refuse, _mask)
    return name


def _refuse(module: nn.Module, *operands: object, **options: object) -> None:
    raise UsageError(f"{_NAME}: the model of this {type(module).__name__} was loaded from a pickle, which has no sequence "
                     f"axis; call use_sequence_attention(model, axis) again, or model.set_attn_implementation('sdpa')")


class SequenceAttention:
    """An attention function of transformers: over whole sequences, of which each rank of an axis has a part."""

    def __init__(self, axis: SequenceAxis, structures: Structures | None = None, *, exchange: Exchange = "auto",
                 backend: Backend = "auto", tensor_rank: int = 0, split_in_eval: bool = True):
        self.axis = axis
        self._structures = structures
        self._exchange: Exchange = exchange
        self._backend: Backend = backend
        self._tensor_rank = tensor_rank
        self._split_in_eval = split_in_eval

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                 dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
                 **others: Any) -> tuple[Tensor, None]:
        """Return this rank's rows (batch, n, heads, dim), and no weights."""
        check_served(_NAME, module, others)
        mask, (attention_mask, causal) = attention_mask, read_mask(_NAME, module, attention_mask, key.shape[2],
                                                                   is_causal=is_causal)
        if not self._split_in_eval and not module.training:
            output = self._of_whole(module, query, key, value, attention_mask, others.get("position_bias"), scale=scaling,
                                    causal=causal, dropout=dropout)
        else:
            _check_whole_sequences(module, query, key, attention_mask, others)
            blocks = None if self._structures is None else _blocks(self._structures, query, self.axis, causal=causal)
            output = attend_sequence(
                query, key, value, self.axis, blocks, scale=scaling, causal=causal,
                key_padding=None if mask is None or attention_mask is None else self.axis.join(mask).to(torch.bool),
                dropout=dropout,
                first_head=self._tensor_rank * query.shape[1], exchange=self._exchange, backend=self._backend)
        return output.transpose(1, 2).contiguous(), None

    def _of_whole(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None,
                  bias: Tensor | None, *, scale: float | None, causal: bool, dropout: float) -> Tensor:
        """Return the attention of whole sequences, whose queries are the last positions of the keys (a cache)."""
        columns = key.shape[2]
        if padding is not None and padding.shape != (query.shape[0], columns):
            raise NotServed(f"{_NAME}: the mask is {tuple(padding.shape)}, and there are {columns} keys of "
                            f"{query.shape[0]} sequences; take a dynamic cache")
        structure = None if self._structures is None else self._structures.of(query.shape[1])
        if structure is not None and query.shape[2] != columns:
            check_continues(_NAME, module, query, key, causal=causal)
        if structure is None or query.shape[2] != columns:
            return attend_cached(structure, query, key, value, padding, bias, causal=causal, dropout=dropout, scale=scale,
                                 backend=self._backend, first_head=self._tensor_rank * query.shape[1])
        return attend_whole(structure, query, key, value, padding, bias, causal=causal, dropout=dropout, scale=scale,
                            backend=self._backend, first_head=self._tensor_rank * query.shape[1])


def _has_sequence_attention(model: TakesAttention) -> bool:
    """Return whether a script has given the model this attention already, by name or by model."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return isinstance(ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation), SequenceAttention)


@contextmanager
def sequence_attention_in(model: nn.Module, axis: SequenceAxis, settings: SparseAttentionSettings, *,
                          tensor_rank: int) -> Generator[None]:
    """Let the Hugging Face models in `model` attend to whole sequences; take it back if the context raises."""
    found = [each for each in models_in(model) if settings.mode is not None or not _has_sequence_attention(each)]
    if settings.mode is not None and not found:
        warn_once(f"sparse_attention: {type(model).__name__} has no model of Hugging Face transformers in it, and nothing "
                  f"is replaced: its script builds the attention, with shoal.sequence_parallel.attend_sequence")
    with attention_kept(found):
        for each in found:
            use_sequence_attention(each, axis, None if settings.mode is None else settings, tensor_rank=tensor_rank)
        yield


def _set_loss(model: Any, axis: SequenceAxis) -> None:
    """Let a language model's loss be that of the whole sequence; warn of a loss that the model computes by itself."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if any(getattr(config, "output_router_logits", False) for config in _configs(model.config)):
        warn_once(f"{type(model).__name__}: the auxiliary loss of its router (output_router_logits) balances the experts "
                  f"over one rank's part of the sequence, so that ranks have different losses, whose mean is not that of "
                  f"the whole; give output_router_logits=False to train without it")
    if model.loss_function is ForCausalLMLoss:
        model.loss_function = SequenceLoss(axis)
    elif not isinstance(model.loss_function, SequenceLoss):
        warn_once(f"{type(model).__name__}: the loss that it computes of labels is the mean of one rank's part; where ranks "
                  f"have different numbers of labels leave them out, and take shoal.sequence_parallel.cross_entropy")


def _blocks(structures: Structures, query: Tensor, axis: SequenceAxis, *, causal: bool) -> Blocks | None:
    """Return the layout of the whole sequence; None, which is dense, where the structure needs a longer one."""
    structure, length = structures.of(query.shape[1]), query.shape[2] * axis.ranks
    if length % structure.block:
        raise UsageError(f"{_NAME}: {axis.ranks} ranks have {query.shape[2]} positions each, and {length} is no multiple of "
                         f"the block {structure.block}; give the model split_batch(batch, axis, multiple={structure.block})")
    return None if length < structure.shortest else structure.blocks(length, causal=causal)


def _check_whole_sequences(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, others: Any) -> None:
    """Raise NotServed for calls that are no attention of a sequence to itself, or need more of it than its padding."""
    if query.shape[2] != key.shape[2]:
        raise NotServed(f"{_NAME}: {type(module).__name__} has {query.shape[2]} queries and {key.shape[2]} keys: a cache or "
                        f"cross attention, which are not split over ranks; pass use_cache=False, or generate without a "
                        f"sequence axis")
    if (mask is not None and mask.dim() != 2) or others.get("position_bias") is not None:
        raise NotServed(f"{_NAME}: {type(module).__name__} gives a mask or a bias of each query and key, whose rows are on "
                        f"other ranks; pad instead of packing, and give windows as a structure (local_sliding_window)")


def _mask(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
          mask_function: Callable[..., Any] | None = None, attention_mask: Tensor | None = None,
          **others: Any) -> Tensor | None:
    """Return the padding of this rank's part (batch, n)."""
    from transformers import masking_utils

    check_interface(_NAME, others.get("config"))
    if mask_function not in (None, masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function):
        raise NotServed(f"{_NAME}: this model masks more than padding (packed sequences, or a sliding window of its own), "
                        f"whose rows are on other ranks; pad instead of packing, and give windows as a structure "
                        f"(local_sliding_window). In torch.compile, which cannot see that nothing is packed, give the model "
                        f"an attention_mask")
    causal = mask_function is not masking_utils.bidirectional_mask_function
    # A tensor of its own, which layers join once for each forward: a script may write to its mask between them
    return padding_mask(attention_mask, (batch_size, kv_length), others.get("device"), causal=causal)
