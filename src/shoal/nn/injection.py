"""Layers of Hugging Face's BERT and GPT-2 compute by `transformer_layer`, with their own parameters.

    inject_transformer_layers(model)        each BertLayer and GPT2Block gets a forward that reads its parameters

Modules, names and state dicts stay; hooks of the layers surround the forward as before. Values are those of the layer, but
for the order of sums; dropout drops other elements with the same probability. A call that the fused layer does not serve
goes to the layer's own forward:

| call | |
|---|---|
| a cache with positions, or any cache without gradients | generation; in training an empty cache stays empty |
| cross attention, returned attention probabilities | |
| a dropout of 1 | |
| attention of another implementation than eager and SDPA | block-sparse or split sequences stay so |
| layers whose linear modules or norms were replaced | tensor-parallel ones, or adapters |
| hooks on modules within the layer | theirs, and those of `weight_norm`, `spectral_norm` and `prune` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import NotServed, UsageError
from shoal.log import warn_once
from shoal.module_hooks import has_hooks
from shoal.nn.layer_form import Affine, LayerForm, LayerWeights, transformer_layer
from shoal.nn.passes import Gelu, check_invertible
from shoal.nn.probe import Choice, choose

__all__ = ["inject_transformer_layers", "restore_transformer_layers"]

_GELUS: Mapping[str, Gelu] = MappingProxyType({"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"})
_OLDEST = 5
_AFFINE = 2
"""The parameters of a norm that the fused layer serves: gain and shift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The options of an injection."""

    invertible: bool
    recompute_gelu: bool
    kernels: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Where a class of layers has its parts."""

    config: Callable[[Any], Any]
    linears: tuple[str, ...]
    """Paths of query, key and value (or all in one), attention output, inner and outer."""
    norms: tuple[str, str]
    """Paths of the norms of attention and of output."""
    linear_class: str
    input_first: bool
    """Whether a weight is (in, out)."""
    arguments: tuple[str, ...]
    """The names of the forward's arguments after hidden_states, in order."""
    gelu: str
    """The name of the activation in the configuration."""
    dropouts: tuple[str, str, str]
    """Paths of the dropout of probabilities, which follows the mode of the module around it, and of those of the outputs of
    attention and MLP, which follow their own."""
    pre_norm: bool
    causal: Callable[[Any], bool]
    scale: Callable[[Any], float | None]


_KINDS: Mapping[str, _Kind] = MappingProxyType({
    "BertLayer": _Kind(
        config=lambda layer: layer.attention.self.config,
        linears=("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                 "intermediate.dense", "output.dense"),
        norms=("attention.output.LayerNorm", "output.LayerNorm"), linear_class="Linear", input_first=False,
        arguments=("attention_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_values"),
        gelu="hidden_act", dropouts=("attention.self.dropout", "attention.output.dropout", "output.dropout"), pre_norm=False,
        causal=lambda layer: layer.is_decoder, scale=lambda layer: None),
    "GPT2Block": _Kind(
        config=lambda layer: layer.attn.config,
        linears=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), norms=("ln_1", "ln_2"), linear_class="Conv1D",
        input_first=True, arguments=("past_key_values", "attention_mask", "encoder_hidden_states", "encoder_attention_mask"),
        gelu="activation_function", dropouts=("attn.attn_dropout", "attn.resid_dropout", "mlp.dropout"), pre_norm=True,
        causal=lambda layer: True, scale=lambda layer: layer.attn.scaling),
})


def inject_transformer_layers(model: nn.Module, *, normalize_invertible: bool = True, gelu_checkpoint: bool = True,
                              kernels: Choice = "auto") -> int:
    """Let the BERT and GPT-2 layers in `model` compute by the fused layer; return how many.

    `normalize_invertible` and `gelu_checkpoint` save memory; gains near 0 are refused in a forward that trains. Raises
    UsageError for a model without such layers, NotServed for an activation that is no GELU, or an older transformers.
    """
    found = [*_layers(model)]
    if not found:
        raise UsageError(f"inject_transformer_layers: {type(model).__name__} has no BertLayer and no GPT2Block of "
                         f"transformers; build other models with shoal.nn.TransformerLayer")
    from transformers import __version__

    if int(__version__.partition(".")[0]) < _OLDEST:
        raise NotServed(f"inject_transformer_layers: transformers is {__version__}, whose layers have other forwards; "
                        f"install transformers>={_OLDEST}")
    for layer, kind in found:  # before any is changed
        activation = getattr(kind.config(layer), kind.gelu)
        if activation not in _GELUS:
            raise NotServed(f"inject_transformer_layers: the activation of {type(layer).__name__} is {activation!r}; only "
                            f"{', '.join(_GELUS)} are computed here")
    options = _Options(invertible=normalize_invertible, recompute_gelu=gelu_checkpoint, kernels=kernels)
    for module, kind in found:
        module.forward = MethodType(_forward(kind, type(module).forward, options), module)
    return len(found)


def restore_transformer_layers(model: nn.Module) -> int:
    """Give the layers in `model` their own forward again; return how many had another."""
    return sum(vars(layer).pop("forward", None) is not None for layer, _ in _layers(model))


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, _Kind]]:
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in _KINDS and kind.__module__.startswith("transformers."):
            yield module, _KINDS[kind.__name__]


def _forward(kind: _Kind, own: Callable[..., Any], options: _Options) -> Callable[..., Any]:
    """Return the fused forward of the layers of `kind`, whose plain one is `own`."""
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:  # pickle finds it by its name
        given = dict(zip(kind.arguments, args, strict=False)) | kwargs
        if (reason := _not_served(self, kind, given)) is not None:
            if reason:
                warn_once(f"inject_transformer_layers: {type(self).__name__} computes by its own forward: {reason}")
            return own(self, hidden_states, *args, **kwargs)
        weights, form = _weights(self, kind), _form(self, kind, options)
        if options.invertible and self.training:
            for norm in (weights.attention_norm, weights.output_norm):
                check_invertible(f"{type(self).__name__}.{norm.name}", norm.weight)
        return transformer_layer(hidden_states, given.get("attention_mask"), weights, form,
                                 choose(options.kernels, hidden_states.device))

    return forward


def _not_served(layer: Any, kind: _Kind, given: Mapping[str, Any]) -> str | None:
    """Return why the fused layer does not serve a call, "" where no warning is due; None where it does."""
    cache = given.get("past_key_values")
    if cache is not None and not (layer.training and torch.is_grad_enabled() and cache.get_seq_length() == 0):
        return ""
    if given.get("encoder_hidden_states") is not None or given.get("output_attentions") or _records_attention():
        return ""
    implementation = kind.config(layer)._attn_implementation
    if implementation not in (None, "eager", "sdpa"):
        return f"its attention is {implementation!r}"
    if any(type(layer.get_submodule(path)).__name__ != kind.linear_class for path in kind.linears):
        return "its linear modules were replaced"
    for path in kind.norms:
        norm = layer.get_submodule(path)
        if type(norm) is not nn.LayerNorm or len(list(norm.parameters())) != _AFFINE:
            return "its norms were replaced"
    if any(type(layer.get_submodule(path)) is not nn.Dropout for path in kind.dropouts):
        return "its dropouts were replaced"
    _, *of_outputs = rates = _dropout_rates(layer, kind)
    if len(set(of_outputs)) > 1:
        return "its two dropouts of hidden states differ"
    if max(rates) >= 1:
        return ""
    hooked = [name for name, module in layer.named_modules() if name and has_hooks(module, "shoal", "transformers")]
    if hooked:
        return f"its {hooked[0]} has hooks"
    return None


def _dropout_rates(layer: Any, kind: _Kind) -> list[float]:
    """Return the shares that the dropouts of `kind` drop in their present modes."""
    around = kind.dropouts[0].rpartition(".")[0]
    modes = [layer.get_submodule(path).training for path in (around, *kind.dropouts[1:])]
    return [layer.get_submodule(path).p if training else 0.0 for path, training in zip(kind.dropouts, modes, strict=True)]


def _records_attention() -> bool:
    """Whether transformers records the probabilities of attention modules in this call of the model, by hooks on them."""
    try:
        from transformers.utils.output_capturing import _active_collector  # pyright: ignore[reportPrivateUsage]
    except ImportError:  # where the layers are told by an argument
        return False
    collected = _active_collector.get()
    return collected is not None and "attentions" in collected


def _weights(layer: nn.Module, kind: _Kind) -> LayerWeights:
    def linear(path: str) -> Affine:
        module: Any = layer.get_submodule(path)
        return Affine(weight=module.weight.t() if kind.input_first else module.weight, bias=module.bias)

    def norm(path: str) -> Affine:
        module: Any = layer.get_submodule(path)
        return Affine(weight=module.weight, bias=module.bias, name=f"{path}.weight")

    *qkv, attention_output, inner, outer = map(linear, kind.linears)
    attention_norm, output_norm = map(norm, kind.norms)
    return LayerWeights(qkv=tuple(qkv), attention_output=attention_output, attention_norm=attention_norm, inner=inner,
                        outer=outer, output_norm=output_norm)


def _form(layer: Any, kind: _Kind, options: _Options) -> LayerForm:
    config = kind.config(layer)
    norm: Any = layer.get_submodule(kind.norms[0])
    attention_dropout, hidden_dropout, _ = _dropout_rates(layer, kind)
    return LayerForm(heads=config.num_attention_heads, pre_norm=kind.pre_norm, eps=norm.eps, causal=kind.causal(layer),
                     scale=kind.scale(layer), gelu=_GELUS[getattr(config, kind.gelu)], attention_dropout=attention_dropout,
                     hidden_dropout=hidden_dropout, invertible=options.invertible, recompute_gelu=options.recompute_gelu)
