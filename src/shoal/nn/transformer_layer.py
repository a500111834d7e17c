"""`TransformerLayer`: an encoder layer under the published configuration and parameter names.

    layer = TransformerLayer(TransformerConfig(hidden_size=768, heads=12, num_hidden_layers=12, initializer_range=0.02))
    y = layer(x, mask)                                     x (batch, length, hidden)

The options that save memory change no value: `normalize_invertible` and `gelu_checkpoint` decide what is saved
(layer_form.py has the table), `attn_dropout_checkpoint` holds in any case, for probabilities and masks are never saved.
`stochastic_mode` is accepted, and results are deterministic all the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, UsageError
from shoal.log import warn_once
from shoal.nn.layer_form import Affine, LayerForm, LayerWeights, transformer_layer
from shoal.nn.passes import check_invertible
from shoal.nn.probe import Choice, choose

__all__ = ["TransformerConfig", "TransformerLayer"]

_INITIAL = 8

_RULES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "int": (lambda value: not isinstance(value, bool) and isinstance(value, Integral), "give a whole number"),
    "float": (lambda value: not isinstance(value, bool) and isinstance(value, Real), "give a number"),
    "bool": (lambda value: isinstance(value, Integral) and value in (0, 1), "give true or false")}
"""Of each type of a field: whether a value is allowed, and the rule in words."""


@dataclass
class TransformerConfig:
    """The published configuration of a layer. -1 stands for a value that is not given."""

    batch_size: int = -1
    """Accepted; a layer takes any batch."""
    hidden_size: int = -1
    intermediate_size: int = -1
    """-1: four times the hidden size."""
    heads: int = -1
    attn_dropout_ratio: float = -1
    """-1: no dropout."""
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    """The layers of the model; `adjust_init_range` needs it."""
    initializer_range: float = -1
    """The standard deviation of initial weights; -1: 0.02."""
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    """Accepted; the layer is built on torch's default device."""
    seed: int = -1
    """Mixed into the random numbers of dropout, which come from torch's generator; -1: nothing is mixed in."""
    fp16: bool = False
    """Build the parameters in fp16."""
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    """Save a norm's output instead of its input; the gains must not be near 0."""
    gelu_checkpoint: bool = False
    """Compute the GELU again in backward instead of saving its output."""
    adjust_init_range: bool = True
    """Divide the deviation of both output projections by sqrt(2 num_hidden_layers)."""
    attn_dropout_checkpoint: bool = False
    """Accepted; no mask of dropout is saved in any case."""
    stochastic_mode: bool = False
    """Accepted; results are deterministic."""
    return_tuple: bool = False
    training: bool = True
    """The mode of a new layer."""

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> Self:
        """Return the configuration of a mapping. Raises ConfigError for unknown keys."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(json_object) - known):
            raise ConfigError(f"TransformerConfig: unknown keys {', '.join(unknown)}; the keys are "
                              f"{', '.join(sorted(known))}")
        return cls(**json_object)

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> Self:
        """Return the configuration of a JSON file. Raises ConfigError for unknown keys."""
        return cls.from_dict(json.loads(Path(json_file).read_text()))

    def check(self) -> None:
        """Raise ConfigError for values that no layer can have."""
        def refuse(key: str, rule: str) -> None:
            raise ConfigError(f"TransformerConfig.{key}: got {getattr(self, key)!r}; {rule}")

        for field in fields(self):
            allowed, rule = _RULES[str(field.type)]
            if not allowed(getattr(self, field.name)):
                refuse(field.name, rule)
        if self.hidden_size < 1:
            refuse("hidden_size", "give the width of hidden states")
        if self.heads < 1 or self.hidden_size % self.heads:
            refuse("heads", f"give a divisor of hidden_size ({self.hidden_size})")
        if self.intermediate_size != -1 and self.intermediate_size < 1:
            refuse("intermediate_size", "give 1 or more, or -1 for 4 x hidden_size")
        for key in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            if getattr(self, key) != -1 and not 0 <= getattr(self, key) < 1:
                refuse(key, "give a probability from 0 to below 1, or -1 for none")
        if not 0 <= self.layer_norm_eps < math.inf:
            refuse("layer_norm_eps", "give a number of at least 0")
        if self.initializer_range != -1 and not 0 < self.initializer_range < math.inf:
            refuse("initializer_range", "give a standard deviation above 0, or -1 for 0.02")
        if self.adjust_init_range and self.num_hidden_layers < 1:
            refuse("num_hidden_layers", "give the number of layers of the model, or set adjust_init_range to false")


class TransformerLayer(nn.Module):
    """An encoder layer with bias, GELU and layer norms; attention is dense over unmasked keys.

    The forward takes (batch, length, hidden) and an additive mask (batch, 1, 1, length) or (batch, length), or one of
    bool, False where hidden; other arguments are accepted and have no effect, as published. `kernels` chooses who computes
    the products. Raises ConfigError for a wrong configuration, UsageError for wrong initial weights.
    """

    layer_id: ClassVar[int] = 0
    """The number of the next layer to be built."""

    def __init__(self, config: TransformerConfig, initial_weights: Sequence[Tensor] | None = None,
                 initial_biases: Sequence[Tensor] | None = None, *, kernels: Choice = "auto"):
        super().__init__()
        config.check()
        self.config = config
        self.number = TransformerLayer.layer_id
        TransformerLayer.layer_id += 1
        self._kernels: Choice = kernels
        hidden, wide = config.hidden_size, config.intermediate_size
        wide = 4 * hidden if wide == -1 else wide
        dtype = torch.float16 if config.fp16 else None
        shapes = {"attn_qkvw": (3 * hidden, hidden), "attn_qkvb": (3 * hidden,), "attn_ow": (hidden, hidden),
                  "attn_ob": (hidden,), "attn_nw": (hidden,), "attn_nb": (hidden,), "inter_w": (wide, hidden),
                  "inter_b": (wide,), "output_w": (hidden, wide), "output_b": (hidden,), "norm_w": (hidden,),
                  "norm_b": (hidden,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
        self.reset_parameters()
        self._take(("attn_qkvw", "attn_ow", "attn_nw", "inter_w", "output_w", "norm_w"), initial_weights, "initial_weights")
        self._take(("attn_qkvb", "attn_ob", "attn_nb", "inter_b", "output_b", "norm_b"), initial_biases, "initial_biases")
        self.train(config.training)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights anew: normal, with the deviation that the configuration says; biases 0, gains 1."""
        config = self.config
        deviation = 0.02 if config.initializer_range == -1 else config.initializer_range
        narrow = deviation / math.sqrt(2 * config.num_hidden_layers) if config.adjust_init_range else deviation
        for name, parameter in self.named_parameters():
            if name in ("attn_nw", "norm_w"):
                parameter.fill_(1)
            elif parameter.dim() == 1:
                parameter.zero_()
            else:
                parameter.normal_(0, narrow if name in ("attn_ow", "output_w") else deviation)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, head_mask: object = None,
                layer_head_mask: object = None, encoder_hidden_states: object = None, encoder_attention_mask: object = None,
                past_key_value: object = None, output_attentions: bool = False, grads: object = None,
                ) -> Tensor | tuple[Tensor]:
        """Return the output (batch, length, hidden), in a tuple with `return_tuple`."""
        ignored = {"head_mask": head_mask, "layer_head_mask": layer_head_mask, "grads": grads,
                   "encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask,
                   "past_key_value": past_key_value, "output_attentions": output_attentions or None}
        if given := [name for name, value in ignored.items() if value is not None]:
            warn_once(f"TransformerLayer: {', '.join(given)}: no effect, as published; only hidden_states and "
                      f"attention_mask are used")
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != self.config.hidden_size:
            raise UsageError(f"TransformerLayer {self.number}: got hidden states {tuple(hidden_states.shape)}; they are "
                             f"(batch, length, {self.config.hidden_size})")
        weights = self._weights()
        dtype = weights.attention_norm.weight.dtype
        if hidden_states.dtype != dtype and not torch.is_autocast_enabled(hidden_states.device.type):
            raise UsageError(f"TransformerLayer {self.number}: got hidden states of {hidden_states.dtype}, and the weights "
                             f"are {dtype}; give both one dtype, or compute within torch.autocast")
        if self.config.normalize_invertible and self.training:
            for norm in (weights.attention_norm, weights.output_norm):
                check_invertible(f"TransformerLayer {self.number}: {norm.name}", norm.weight)
        seed = 0 if self.config.seed == -1 else hash((self.config.seed, self.number)) & (2**62 - 1)
        output = transformer_layer(hidden_states, attention_mask, weights, self._form(),
                                   choose(self._kernels, hidden_states.device), seed=seed)
        return (output,) if self.config.return_tuple else output

    def extra_repr(self) -> str:
        config = self.config
        return f"hidden_size={config.hidden_size}, heads={config.heads}, pre_layer_norm={config.pre_layer_norm}"

    def _form(self) -> LayerForm:
        config = self.config
        dropouts = [max(ratio, 0.0) if self.training else 0.0
                    for ratio in (config.attn_dropout_ratio, config.hidden_dropout_ratio)]
        return LayerForm(heads=config.heads, pre_norm=config.pre_layer_norm, eps=config.layer_norm_eps,
                         attention_dropout=dropouts[0], hidden_dropout=dropouts[1],
                         invertible=config.normalize_invertible, recompute_gelu=config.gelu_checkpoint)

    def _weights(self) -> LayerWeights:
        def affine(weight: str, bias: str) -> Affine:
            return Affine(weight=getattr(self, weight), bias=getattr(self, bias), name=weight)  # also of a parametrization

        return LayerWeights(qkv=(affine("attn_qkvw", "attn_qkvb"),), attention_output=affine("attn_ow", "attn_ob"),
                            attention_norm=affine("attn_nw", "attn_nb"), inner=affine("inter_w", "inter_b"),
                            outer=affine("output_w", "output_b"), output_norm=affine("norm_w", "norm_b"))

    @torch.no_grad()
    def _take(self, names: tuple[str, ...], given: Sequence[Tensor] | None, argument: str) -> None:
        """Copy the values of `given`: those of queries, keys and values, and then of the others in order."""
        if given is None:
            return
        wanted = [(3, self.get_parameter(name).shape) if name.startswith("attn_qkv") else (1, self.get_parameter(name).shape)
                  for name in names]
        shapes = [torch.Size((shape[0] // parts, *shape[1:])) for parts, shape in wanted for _ in range(parts)]
        if len(given) != _INITIAL or [each.shape for each in given] != shapes:
            raise UsageError(f"TransformerLayer: {argument}: got {[tuple(each.shape) for each in given]}; give those of "
                             f"query, key, value and then of {', '.join(names[1:])}: {[tuple(shape) for shape in shapes]}")
        for name, value in zip(names, [torch.cat(list(given[:3])), *given[3:]], strict=True):
            self.get_parameter(name).copy_(value)
