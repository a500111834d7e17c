"""The transformer layer as a function of its weights, which saves for backward no more than it must.

    post norm (BERT)     a = norm(x + drop(attend(x)));    y = norm(a + drop(mlp(a)))
    pre norm (GPT)       a = x + drop(attend(norm(x)));    y = a + drop(mlp(norm(a)))

Saved, in units of one hidden state (tokens x hidden), with all options:

    post norm            x, q, k, v, context, a, u (4), y                  11, of which x and y are shared with neighbours
    pre norm             norm(x), q, k, v, context, norm(a), u (4)         10

u is the wide intermediate before the GELU. Without `invertible` the norms save their inputs, beside their outputs that the
next products save: 2 more in a stack. Without `recompute_gelu` the GELU's output is saved, 4 more. Dropout saves nothing,
and neither do attention's probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.attention import Blocks, attend
from shoal.autograd import needs_operators
from shoal.errors import UsageError
from shoal.nn.linear import linear
from shoal.nn.passes import (
    Gelu,
    bias_gelu,
    dropout_add,
    dropout_add_norm,
    dropout_add_norm_with_sum,
    fused_passes,
    gelu_linear,
    layer_norm,
)
from shoal.products import Products

__all__ = ["Affine", "LayerForm", "LayerWeights", "transformer_layer"]

_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """Weight and bias of a linear layer (out, in), (out,); or gain and shift of a norm, with the name of the gain."""

    weight: Tensor
    bias: Tensor
    name: str = ""

    def biases(self, fused: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the bias that the product adds, and the one that the pass behind it adds: one of them is None."""
        return (None, self.bias) if fused else (self.bias, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The parameters of a layer."""

    qkv: tuple[Affine, ...]
    """Projections to queries, keys and values: one fused, or three."""
    attention_output: Affine
    attention_norm: Affine
    inner: Affine
    outer: Affine
    output_norm: Affine


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """The function that a layer computes of its weights."""

    heads: int
    pre_norm: bool
    eps: float = 1e-12
    causal: bool = False
    scale: float | None = None
    """The factor on scores; None: 1 / sqrt(head dim)."""
    gelu: Gelu = "none"
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    invertible: bool = True
    recompute_gelu: bool = True


def transformer_layer(x: Tensor, mask: Tensor | None, weights: LayerWeights, form: LayerForm, products: Products, *,
                      seed: int = 0) -> Tensor:
    """Return the layer's output (batch, length, hidden) of `x`.

    `mask` is added to the scores, or hides where it is False if it is bool: (batch, length) of keys, or (batch or 1, heads
    or 1, length or 1, length). Random numbers follow from torch's generator of the host and `seed`. Raises UsageError for
    a mask of another shape, or of whole numbers.
    """
    _check_mask(mask, x, form)
    seeds = [number ^ seed for number in torch.randint(2**62, (3,), device="cpu").tolist()] if (
        form.attention_dropout or form.hidden_dropout) else [0, 0, 0]
    first = weights.attention_norm
    # The passes add the biases where they serve the layer's dtype; autocast may give products another one.
    fused = fused_passes(x, first.weight) is not None and not torch.is_autocast_enabled(x.device.type)
    source = layer_norm(x, first.weight, first.bias, form.eps, invertible=form.invertible) if form.pre_norm else x
    context = _attention(source, mask, weights, form, products, seeds[0])
    of_product, of_pass = weights.attention_output.biases(fused)
    output = linear(context, weights.attention_output.weight, of_product, products)
    if form.pre_norm:
        norm = weights.output_norm
        a, inner = dropout_add_norm_with_sum(output, x, norm.weight, norm.bias, bias=of_pass, eps=form.eps,
                                             dropout=form.hidden_dropout, seed=seeds[1], invertible=form.invertible)
        output = _mlp(inner, weights, form, products, weights.outer.bias, fused=fused)
        return dropout_add(output, a, dropout=form.hidden_dropout, seed=seeds[2])
    a = dropout_add_norm(output, x, first.weight, first.bias, bias=of_pass, eps=form.eps, dropout=form.hidden_dropout,
                         seed=seeds[1], invertible=form.invertible)
    of_product, of_pass = weights.outer.biases(fused)
    output = _mlp(a, weights, form, products, of_product, fused=fused)
    last = weights.output_norm
    return dropout_add_norm(output, a, last.weight, last.bias, bias=of_pass, eps=form.eps, dropout=form.hidden_dropout,
                            seed=seeds[2], invertible=form.invertible)


def _check_mask(mask: Tensor | None, x: Tensor, form: LayerForm) -> None:
    if mask is None:
        return
    batch, length = x.shape[:2]
    allowed = ((batch,), (length,)) if mask.dim() == 2 else ((1, batch), (1, form.heads), (1, length), (length,))
    if mask.dim() not in (2, 4) or any(size not in sizes for size, sizes in zip(mask.shape, allowed, strict=True)):
        raise UsageError(f"attention mask: got {tuple(mask.shape)} beside hidden states {tuple(x.shape)}; give ({batch}, "
                         f"{length}) for keys, or ({batch} or 1, {form.heads} or 1, {length} or 1, {length})")
    if not (mask.is_floating_point() or mask.dtype == torch.bool):
        raise UsageError(f"attention mask: got {tuple(mask.shape)} of {mask.dtype}; give one of bool, False where hidden "
                         f"(mask.bool()), or one of floats that is added to the scores (0, and -inf where hidden)")


def _mlp(x: Tensor, weights: LayerWeights, form: LayerForm, products: Products, bias: Tensor | None, *,
         fused: bool) -> Tensor:
    """Return gelu(x W1^T + b1) W2^T + bias."""
    of_product, of_pass = weights.inner.biases(fused)
    u = linear(x, weights.inner.weight, of_product, products)
    if form.recompute_gelu:
        return gelu_linear(u, weights.outer.weight, bias, approximate=form.gelu, products=products, inner_bias=of_pass)
    wide = F.gelu(u, approximate=form.gelu) if of_pass is None else bias_gelu(u, of_pass, approximate=form.gelu)
    return linear(wide, weights.outer.weight, bias, products)


def _attention(x: Tensor, mask: Tensor | None, weights: LayerWeights, form: LayerForm, products: Products,
               seed: int) -> Tensor:
    """Return the context (batch, length, hidden)."""
    projected = [linear(x, each.weight, each.bias, products) for each in weights.qkv]
    parts = projected[0].chunk(3, -1) if len(projected) == 1 else projected
    query, key, value = (part.unflatten(-1, (form.heads, part.shape[-1] // form.heads)).transpose(1, 2) for part in parts)
    followed = needs_operators(x) and (torch.compiler.is_exporting() or not torch.compiler.is_compiling())
    if x.device.type == "cpu" and x.dtype != torch.float64 and not followed:
        context = _on_host(query, key, value, mask, form, seed)
    else:  # on accelerators fused kernels, which save no probabilities; their dropout is by a counter too
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=None if mask is None else _four_dims(mask, form, query), scale=form.scale,
            dropout_p=form.attention_dropout, is_causal=form.causal and mask is None)
    return context.transpose(1, 2).flatten(-2)


def _on_host(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: LayerForm, seed: int) -> Tensor:
    """Return dense attention by the blocks of `shoal.attention`: padded to whole blocks, and cut again."""
    length = query.shape[2]
    missing = -length % _BLOCK
    padding, bias = _split_mask(mask, query)
    if missing:
        query, key, value = (F.pad(each, (0, 0, 0, missing)) for each in (query, key, value))
        if padding is None:
            padding = torch.ones(query.shape[0], length, dtype=torch.bool, device=query.device)
        padding = F.pad(padding, (0, missing), value=False if padding.dtype == torch.bool else -torch.inf)
        bias = None if bias is None else F.pad(bias, (0, missing, 0, missing))
    blocks = Blocks.dense(length + missing, length + missing, _BLOCK)
    mode = "mul" if padding is not None and padding.dtype == torch.bool else "add"
    return attend(query, key, value, blocks, scale=form.scale, causal=form.causal, key_padding=padding,
                  key_padding_mode=mode, bias=bias, dropout=form.attention_dropout, seed=seed)[:, :, :length]


def _split_mask(mask: Tensor | None, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask as one of keys (batch, length), or else as an addend of scores."""
    if mask is None:
        return None, None
    if mask.dim() == 2:
        return mask, None
    same_for_queries = mask.shape[-2] == 1 or mask.stride(-2) == 0
    same_for_heads = mask.shape[1] == 1 or mask.stride(1) == 0
    if same_for_queries and same_for_heads:
        return mask[:, 0, 0].expand(query.shape[0], -1), None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return None, mask if mask.shape[-2] > 1 else mask.expand(-1, -1, query.shape[2], -1)


def _four_dims(mask: Tensor, form: LayerForm, query: Tensor) -> Tensor:
    """Return the mask of `scaled_dot_product_attention`, with the causal one in it."""
    mask = mask[:, None, None] if mask.dim() == 2 else mask
    mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
    if not form.causal:
        return mask
    length = query.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
