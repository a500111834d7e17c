"""All ranks of a sequence axis read the whole batch, and each takes its part of every tensor that has a sequence dim.

    input_ids (batch, L)     -> positions r n to (r + 1) n
    labels (batch, L)        -> the same; beside them shift_labels, each position's next label, shifted before the cut
    position_ids             -> made where there are none, since a model would count from 0 on every rank
    attention_mask           -> the same; attention puts the parts together
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import NotServed, UsageError
from shoal.sequence_parallel.axis import SequenceAxis

__all__ = ["Positions", "split_batch"]

Positions = Literal["all", "tokens"]

IGNORED = -100
_TOKENS = ("input_ids", "inputs_embeds", "tokens", "text")
"""Names of the tensor that has the sequence, the first that is there."""
_IGNORED = ("labels", "shift_labels")
"""Names of tensors that are filled up with -100; those of the sequence are with the padding token, others with 0."""


def split_batch(batch: Mapping[str, Any], axis: SequenceAxis, *, multiple: int = 1, padding_token: int = 0,
                causal: bool = True, positions: Positions = "all") -> dict[str, Any]:
    """Return this rank's part of a `batch` of named tensors (batch, L, ...), which all ranks of the sequence have read.

    The sequence is that of `input_ids` (or `inputs_embeds`, `tokens`, `text`); tensors of another length in dim 1 stay
    whole. It is padded on the right so that each rank has a `multiple` of positions: with `padding_token`, hidden by the
    attention mask and labelled -100. `position_ids` are added; with `causal` so is `shift_labels`, what each position
    predicts, where there are `labels`.

    `positions` says how `position_ids` count: "all" from 0, whatever the tokens are; "tokens" as RoBERTa does, where padding
    tokens have the position `padding_token`, and the others count on from it. Raises UsageError for a batch without a
    sequence, and for "tokens" of a batch without ids of tokens; NotServed for `position_ids` of packed documents.
    """
    if positions not in ("all", "tokens"):
        raise UsageError(f"split: got positions={positions!r}; they count \"all\" from 0, or \"tokens\" from the "
                         f"padding token")
    name = next((each for each in _TOKENS if isinstance(batch.get(each), Tensor)), None)
    if name is None:
        raise UsageError(f"split: got {', '.join(map(str, batch)) or 'nothing'}; a batch has its sequence as one of "
                         f"{', '.join(_TOKENS)}. Cut other tensors by tensor[:, axis.part(length)]")
    if batch[name].dim() < 2:
        raise UsageError(f"split: {name} is {tuple(batch[name].shape)}; give (batch, length, ...), such as one sequence by "
                         f"{name}.unsqueeze(0)")
    length, batches = batch[name].shape[1], batch[name].shape[0]
    if causal:
        _check_labels(batch, length)
    unit = multiple * axis.ranks
    missing = -length % unit
    if causal and "attention_mask" not in batch:
        _check_one_document(batch.get("position_ids"), batches, length)
    of_sequence = {key for key, value in batch.items() if _has_sequence(value, length)}
    whole = {key: _padded(key, value, missing, padding_token) if key in of_sequence else value
             for key, value in batch.items()}
    device = batch[name].device
    if missing and "attention_mask" not in whole:
        whole["attention_mask"] = F.pad(torch.ones(batches, length, dtype=torch.int64, device=device), (0, missing))
    if "position_ids" not in whole:
        whole["position_ids"] = (_token_positions(name, whole[name], padding_token) if positions == "tokens" else
                                 torch.arange(length + missing, device=device).clamp_(max=length - 1).expand(batches, -1))
    if causal and "labels" in of_sequence and "shift_labels" not in whole:
        whole["shift_labels"] = F.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)
    of_sequence |= whole.keys() - batch.keys()
    mine = axis.part(length + missing, "split")
    return {key: value[:, mine].contiguous() if key in of_sequence else value for key, value in whole.items()}


def _check_labels(batch: Mapping[str, Any], length: int) -> None:
    """Raise UsageError for labels of tokens that are those of another sequence."""
    for name in _IGNORED:
        labels = batch.get(name)
        if isinstance(labels, Tensor) and labels.dim() > 1 and labels.shape[1] != length:
            raise UsageError(f"split: {name} are {tuple(labels.shape)}, and the sequence has {length} positions; give a "
                             f"label of each position, {IGNORED} where there is none")


def _token_positions(name: str, tokens: Tensor, padding_token: int) -> Tensor:
    """Return the positions (batch, L) that RoBERTa makes of its tokens: they leave out padding."""
    if tokens.is_floating_point():
        raise UsageError(f"split: positions=\"tokens\" counts the ids of tokens, and the sequence is {name} "
                         f"{tuple(tokens.shape)} {tokens.dtype}; give position_ids (batch, L) in the batch")
    is_token = tokens.ne(padding_token)
    return torch.where(is_token, is_token.cumsum(1) + padding_token, padding_token)


def _has_sequence(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length


def _padded(name: str, value: Tensor, missing: int, padding_token: int) -> Tensor:
    if not missing:
        return value
    if name == "position_ids":  # the last one again: a model may have no more
        return torch.cat([value, *[value[:, -1:]] * missing], 1)
    fill = 0 if value.is_floating_point() or value.dtype == torch.bool or name not in (*_TOKENS, *_IGNORED) else (
        IGNORED if name in _IGNORED else padding_token)
    return F.pad(value, (*(0, 0) * (value.dim() - 2), 0, missing), value=fill)


def _check_one_document(positions: Any, batches: int, length: int) -> None:
    """Raise NotServed for positions of packed documents: models tell them apart by positions of one rank's part alone."""
    if not isinstance(positions, Tensor) or positions.shape not in ((batches, length), (1, length)):
        return
    if bool((positions.diff(dim=1) != 1).any()):
        raise NotServed("split: position_ids do not count on by 1 along the sequence, as where documents are packed, and "
                        "there is no attention_mask: ranks would attend across documents; pad instead of packing, or give "
                        "an attention_mask (batch, length) where it is one document")
