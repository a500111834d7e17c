"""`use_tiled_loss(model)`: a causal language model of Hugging Face transformers computes its loss in tiles.

    forward(labels=...) in training:   the head hands its input on, and the loss function calls the head with the labels
    any other forward:                 as before, with logits

The head is replaced by one with the same parameters; state dict, tying and generation stay. In training the output's
`logits` is None. A model that changes its logits between head and loss (a softcap, a scale) is refused in its first forward:
the loss function must be handed the very tensor that the head returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import signature, unwrap
from types import FunctionType
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import NotServed, UsageError
from shoal.nn.cross_entropy import cross_entropy
from shoal.nn.heads import TiledHead, TiledVocabularyHead, tiled_head
from shoal.nn.probe import Choice
from shoal.nn.tiled_loss import TiledLoss

__all__ = ["use_tiled_loss"]


@runtime_checkable
class _LanguageModel(Protocol):
    """A model of transformers with an output head; its `loss_function` can be set."""

    def get_output_embeddings(self) -> Any: ...

    def set_output_embeddings(self, new_embeddings: Any) -> None: ...


def use_tiled_loss(model: nn.Module, *, loss: TiledLoss | None = None, kernels: Choice = "auto") -> None:
    """Let the causal language model `model` compute its training loss without its logits, whose memory is saved.

    `loss` gives options beside the model's own ignore_index and mean. Raises UsageError for other models, NotServed for one
    whose loss is not that of a causal language model.
    """
    try:
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError as error:
        raise UsageError(f"use_tiled_loss: the package transformers is not installed, or too old for it ({error}); install "
                         f"transformers>=4.57") from None
    if not isinstance(model, _LanguageModel) or not isinstance(head := model.get_output_embeddings(), nn.Module):
        raise UsageError(f"use_tiled_loss: {type(model).__name__} is no language model of transformers with an output head; "
                         f"in other models replace the head by shoal.nn.tiled_head(head), and call head(hidden, targets)")
    if isinstance(head, TiledHead | TiledVocabularyHead):
        raise UsageError(f"use_tiled_loss: {type(model).__name__} has a tiled head already; call it once")
    language: Any = model
    if language.loss_function is not ForCausalLMLoss:
        raise NotServed(f"use_tiled_loss: the loss of {type(model).__name__} is {language.loss_function!r}, and only that "
                        f"of causal language models on whole sequences is computed in tiles; leave this model as it is")
    if not _calls_loss_function(type(model)):
        raise NotServed(f"use_tiled_loss: {type(model).__name__} computes another loss in its forward than its "
                        f"loss_function; leave this model as it is")
    tiled = tiled_head(head, loss=loss, kernels=kernels)
    deferral = _Deferral(tiled, loss or TiledLoss(), type(model).__name__)
    language.set_output_embeddings(tiled)
    language.loss_function = deferral.loss
    tiled.register_forward_pre_hook(deferral.before_head, with_kwargs=True)
    tiled.register_forward_hook(deferral.after_head, prepend=True)  # what another hook makes of it is not the same tensor
    model.register_forward_pre_hook(deferral.before_model, with_kwargs=True)
    model.register_forward_hook(deferral.after_model, always_call=True)


def _calls_loss_function(model: type[nn.Module]) -> bool:
    """Whether a forward of the class, or of one that it extends, names `loss_function`: in others the logits are used.

    Asked before the first forward: there another loss would fail on what stands for the logits, with words about its sizes.
    """
    forwards = (unwrap(each.__dict__["forward"]) for each in model.__mro__ if "forward" in each.__dict__)
    return any("loss_function" in each.__code__.co_names for each in forwards if isinstance(each, FunctionType))


class _Deferral:
    """The hooks that let the loss function call the head, in a training forward with labels."""

    def __init__(self, head: nn.Module, loss: TiledLoss, model: str):
        self._head, self._loss, self._model = head, loss, model
        self._deferring = self._taken = False
        self._handed_on: Tensor | None = None

    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin to defer if the forward trains on labels. Raises UsageError where another head took the place of ours."""
        given = signature(model.forward).bind_partial(*args, **kwargs).arguments
        self._deferring, self._taken = model.training and given.get("labels") is not None, False
        head = cast(_LanguageModel, model).get_output_embeddings()
        if self._deferring and head is not self._head:
            raise UsageError(f"use_tiled_loss: the output head of {self._model} was replaced by a {type(head).__name__} "
                             f"afterwards, which gives logits; leave the head out of what replaces it (of PEFT's "
                             f"target_modules), or the model as it is")

    def before_head(self, head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Let the head return its input, unless it is called for the loss."""
        asks_logits = len(args) < 2 and "targets" not in kwargs
        return args, {**kwargs, "hand_on": True} if self._deferring and asks_logits else kwargs

    def after_head(self, head: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Remember the tensor that the loss function is to receive."""
        if self._deferring and self._handed_on is None:
            self._handed_on = output

    def loss(self, logits: Tensor, labels: Tensor | None = None, vocab_size: int = 0, *,
             num_items_in_batch: Tensor | float | None = None, ignore_index: int = -100, shift_labels: Tensor | None = None,
             **others: Any) -> Tensor:
        """Return the loss of the next token: the mean, or the sum over `num_items_in_batch`."""
        deferred = self._deferring and logits is self._handed_on
        if self._deferring and not deferred:
            raise NotServed(f"use_tiled_loss: {self._model} changes its logits between the head and the loss (a softcap or "
                            f"a scale), so that the loss of a tile is another; leave this model as it is")
        if shift_labels is None:
            if labels is None:
                raise UsageError(f"use_tiled_loss: the loss of {self._model} was called with neither labels nor "
                                 f"shift_labels; give one of them")
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = replace(self._loss, ignore_index=ignore_index, reduction="mean" if num_items_in_batch is None else "sum")
        targets = shift_labels.to(logits.device)
        self._taken = True
        total = self._head(logits, targets, loss=loss) if deferred else cross_entropy(
            logits, targets, ignore_index=ignore_index, label_smoothing=loss.label_smoothing, z_loss=loss.z_loss,
            reduction=loss.reduction)
        items = num_items_in_batch.to(total.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
        return total if items is None else total / items

    def after_model(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """End the deferral; return the output without what stood for logits."""
        deferred, handed_on, taken = self._deferring, self._handed_on, self._taken
        self._deferring, self._handed_on = False, None
        if not deferred or handed_on is None or output is None:
            return None
        if not taken:
            raise NotServed(f"use_tiled_loss: {self._model} was given labels and did not call its loss_function, but "
                            f"another loss; leave this model as it is")
        if isinstance(output, Mapping):
            kept = {name: value for name, value in cast(Mapping[str, Any], output).items() if value is not handed_on}
            return type(output)(**kept)
        return tuple(None if value is handed_on else value for value in output)
