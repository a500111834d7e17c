"""Which models of transformers block-sparse attention can serve, and which are refused: by model, by mask and by call.

`use_sparse_attention` and `initialize` look at the whole model. A model that has the attention by its name alone is looked
at by what it gives: the configuration when it asks for its mask, the module and the arguments of each call.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from inspect import getsource
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import NotServed
from shoal.log import warn_once

__all__ = ["check_continues", "check_interface", "check_model", "check_served"]

_NOT_COMPUTED = ("block_indices", "cache", "indices", "s_aux", "sinks", "softcap")
"""Arguments of attention functions that change its result: keys that the model chooses, sinks, a cap of scores."""


def check_served(name: str, module: nn.Module, others: Mapping[str, Any]) -> None:
    """Raise NotServed for what the attention `name` cannot compute."""
    for each in _NOT_COMPUTED:
        if others.get(each) is not None:
            raise NotServed(f"{name}: {type(module).__name__} gives {each}, which this attention does not compute; choose "
                            f"attn_implementation='eager' for this model")
    crosses = getattr(module, "is_cross_attention", False) is True or "CrossAttention" in type(module).__name__
    if crosses or _declares_cross_attention(module):
        raise NotServed(f"{name}: {type(module).__name__} belongs to a model with cross attention, and a layout is of one "
                        f"sequence; choose attn_implementation='sdpa' for this model")
    if others.get("output_attentions"):
        warn_once(f"{name}: output_attentions has no effect: the probabilities are not kept; choose 'eager' to see them")


def _declares_cross_attention(module: nn.Module) -> bool:
    """Whether the configuration of a layer says that its model has cross attention, and the layer is not of its encoder."""
    config = getattr(module, "config", None)
    declared = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
    return bool(declared) and getattr(module, "is_decoder", None) is not False


def check_model(caller: str, model: object) -> None:
    """Raise NotServed for models whose attention this one cannot be, also where no call of it would tell.

    The configuration of an encoder-decoder declares cross attention, that of a Q-Former does not. Doge and models with an
    indexer (DeepSeek V3.2, HY-V4) choose keys, and LASR's convolution skips padding, by a mask of four dims before the
    call. FNet and Mamba have no attention. GIT's vision tower takes the interface, and its text layers do not.
    """
    if isinstance(model, nn.Module) and not any(_takes_interface(type(module)) for module in model.modules()):
        raise NotServed(f"{caller}: {type(model).__name__} computes no attention by the attention interface of "
                        f"transformers, so that nothing would be replaced; take a model whose attn_implementation can be "
                        f"set")
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if path.rpartition(".")[2] == "crossattention":
            raise NotServed(f"{caller}: {type(model).__name__} has cross attention ({path}), and a layout is of one "
                            f"sequence; choose attn_implementation='sdpa' for this model")
        if "Attention" in type(module).__name__ and _declares_cross_attention(module):
            raise NotServed(f"{caller}: the configuration of {type(model).__name__} declares cross attention "
                            f"(is_encoder_decoder or add_cross_attention), and a layout is of one sequence; choose "
                            f"attn_implementation='sdpa' for this model")
        if hasattr(type(module), "prepare_dynamic_mask") or hasattr(module, "indexer"):
            raise NotServed(f"{caller}: {type(module).__name__} chooses the keys of each query itself ({path}); choose "
                            f"attn_implementation='eager' for this model")
        if _computes_attention(type(module)):
            raise NotServed(f"{caller}: {type(module).__name__} computes its attention by itself ({path}), not by the "
                            f"attention interface of transformers; choose attn_implementation='eager' for this model")
        if type(module).__name__ == "LasrEncoderConvolutionModule":
            raise NotServed(f"{caller}: {type(module).__name__} ({path}) reads a mask of each query and key, and this "
                            f"attention makes one of the padding alone; choose attn_implementation='sdpa' for this model")


@cache
def _computes_attention(kind: type[nn.Module]) -> bool:
    """Whether a class of transformers adds a mask to scores of its own."""
    if not kind.__module__.startswith("transformers.") or "Attention" not in kind.__name__:
        return False
    try:
        source = getsource(kind.forward)
    except (OSError, TypeError):  # installed without sources
        return False
    return "attention_mask" in source and "softmax(" in source and "attention_interface" not in source


def _takes_interface(kind: type[nn.Module]) -> bool:
    """Whether the file of a class uses transformers' table of attention functions."""
    return _has_interface(sys.modules.get(kind.__module__))


def _has_interface(file: object) -> bool:
    return any(hasattr(file, name) for name in ("ALL_ATTENTION_FUNCTIONS", "AttentionInterface", "modeling_utils"))


def check_interface(name: str, config: object) -> None:
    """Raise NotServed in the mask of a model of `config` whose file computes attention by itself.

    Given a name, transformers asks no such model whether it takes it: it would get this mask, and read it as another.
    """
    if not _file_has_interface(type(config).__module__):
        raise NotServed(f"{name}: the model of this {type(config).__name__} computes its attention by itself, not by the "
                        f"attention interface of transformers; choose attn_implementation='eager' for this model")


@torch.compiler.assume_constant_result
def _file_has_interface(of_config: str) -> bool:
    """Whether the file of the models of a configuration, which is in `of_config`, has layers that take the interface."""
    return _found_interface(of_config)


@cache
def _found_interface(of_config: str) -> bool:
    """Look for it, once: a file may build on the layers of another one, as DPR's does. True where there is no such file."""
    file = sys.modules.get(of_config.replace(".configuration_", ".modeling_"))
    if file is None or ".modeling_" not in file.__name__ or _has_interface(file):
        return True
    layers = [each for each in vars(file).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    return any(".models." in each.__module__ and _takes_interface(each) for each in layers)


def check_continues(name: str, module: nn.Module, query: Tensor, key: Tensor, *, causal: bool) -> None:
    """Raise NotServed where the keys are not those of a cache that ends with the queries' own."""
    if not causal or query.shape[2] > key.shape[2]:
        raise NotServed(f"{name}: {type(module).__name__} has {query.shape[2]} queries and {key.shape[2]} keys, and is "
                        f"{'' if causal else 'not '}causal: cross attention or a prefix, and a layout is of one sequence; "
                        f"choose attn_implementation='sdpa' for this model")
