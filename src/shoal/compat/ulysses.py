"""Ulysses under its published names: heads are exchanged for positions, so that each rank attends over whole sequences.

    DistributedAttention      around any attention function of whole sequences, in any layout of its operands
    UlyssesSPAttentionHF      for models of Hugging Face transformers; the loss stays that of a rank's part
    UlyssesSPDataLoaderAdapter    makes of one batch of each sequence rank as many batches of all of them, cut

The attention is that of `shoal.sequence_parallel`: heads need not be divided by the ranks, and padding is hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal import comm
from shoal.compat.deepspeed.utils import groups
from shoal.compat.raising import as_published
from shoal.errors import NotSupportedYet, UsageError
from shoal.log import warn_once
from shoal.mesh.mesh import Mesh
from shoal.sequence_parallel.axis import SequenceAxis
from shoal.sequence_parallel.heads import exchange_heads
from shoal.sequence_parallel.hugging_face import SequenceAttention, register_sequence_attention, use_sequence_attention
from shoal.sequence_parallel.split import split_batch
from shoal.transport import process_group

__all__ = ["DistributedAttention", "SeqAllToAll", "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter", "single_all_to_all"]


class DistributedAttention(nn.Module):
    """Any attention of whole sequences, over sequences that the ranks of a group have parts of."""

    def __init__(self, local_attention: Any, sequence_process_group: Any, scatter_idx: int = 2, gather_idx: int = 0,
                 sp_stream: Any = None, num_kv_heads: int | None = None):
        """Take `local_attention(query, key, value, *args, **kwargs)`, which is given some heads of whole sequences.

        `scatter_idx` is the dim of heads, `gather_idx` that of positions. `sp_stream` has no effect, with a warning, and
        `num_kv_heads` none: the heads of keys are counted.
        """
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self._axis: SequenceAxis | None = None
        if sp_stream is not None:
            warn_once("DistributedAttention: sp_stream has no effect: messages and computation do not overlap here")

    @as_published
    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int,
                rotary_pos_emb: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        """Return this rank's positions of the result, in the layout of what `local_attention` returns.

        Operands have four dims, of which the first three are batch, positions and heads in any order. `local_attention`
        returns their layout, or joins heads and their dim (Megatron). Raises UsageError for other shapes, NotSupportedYet
        for `rotary_pos_emb`.
        """
        if rotary_pos_emb is not None:
            raise NotSupportedYet("DistributedAttention: rotary_pos_emb is not supported yet; rotate query and key of this "
                                  "rank by its own positions before the call")
        order = self._order(query, batch_dim_idx)
        axis = self._sequence_axis()
        if query.shape[self.scatter_idx] < axis.ranks:
            raise UsageError(f"DistributedAttention: {query.shape[self.scatter_idx]} heads are fewer than the {axis.ranks} "
                             f"sequence ranks; take fewer ranks, or shoal.sequence_parallel.attend_sequence")
        joined = False
        back = tuple(order.index(dim) for dim in range(4))

        def whole(*operands: Tensor) -> Tensor:
            nonlocal joined
            output = self.local_attn(*(each.permute(back).contiguous() for each in operands), *args, **kwargs)
            joined = output.dim() == 3
            heads = operands[0].shape[1]
            return (output.unflatten(2, (heads, -1)) if joined else output).permute(order)

        output = exchange_heads(whole, query.permute(order), key.permute(order), value.permute(order), axis).permute(back)
        return output.flatten(2) if joined else output

    def _order(self, query: Tensor, batch: int) -> tuple[int, int, int, int]:
        """Return the dims of batch, heads and positions in the operands, and that of the head's elements."""
        heads = self.scatter_idx
        if query.dim() != 4 or batch not in (0, 1, 2) or heads not in (0, 1, 2) or batch == heads:
            raise UsageError(f"DistributedAttention: query is {tuple(query.shape)} with batch_dim_idx {batch!r} and "
                             f"scatter_idx {heads!r}; operands have four dims, and batch and heads are two of "
                             f"the first three")
        positions = 3 - batch - heads
        if self.gather_idx not in (positions, 0):  # 0 is the default, which scripts leave where the batch comes first
            raise UsageError(f"DistributedAttention: gather_idx is {self.gather_idx}, and beside the batch in dim {batch} "
                             f"and the heads in dim {heads} the positions are in dim {positions}; give "
                             f"gather_idx={positions}")
        return batch, heads, positions, 3

    def _sequence_axis(self) -> SequenceAxis:
        if self._axis is None:
            group = torch.distributed.group.WORLD if self.spg is None else self.spg
            assert group is not None, "init_distributed comes first"
            self._axis = SequenceAxis(group)
        return self._axis


class UlyssesSPAttentionHF:
    """Attention over split sequences for the models of Hugging Face transformers."""

    @classmethod
    @as_published
    def register_with_transformers(cls, model_name_or_path: Any, core_attn_implementation: str | None,
                                   sequence_parallel_size: int, micro_batch_size: int | None = None,
                                   seq_length: int | None = None, seq_length_is_variable: bool = True,
                                   disable_in_eval: bool = False, max_length: int | None = None) -> Mesh:
        """Give a model, or all that a name loads later, attention over split sequences; return the `mpu` for `initialize`.

        `model_name_or_path` is a model, or the name or the path that is loaded with
        `attn_implementation=core_attn_implementation`, whose function this one replaces in the process. Shoal's own
        attention computes in any case. `disable_in_eval`: in eval mode each rank has whole sequences of its own. Lengths
        may vary unless `seq_length_is_variable` is false; then `seq_length` (older: `max_length`) must be divided by the
        ranks. A collective call. Raises UsageError where sizes do not divide.
        """
        process_group.init_distributed()
        mesh = Mesh(sequence=sequence_parallel_size)
        axis = SequenceAxis(mesh.group("sequence"))
        length = max_length if seq_length is None else seq_length
        if not seq_length_is_variable:
            if length is None:
                raise UsageError("register_with_transformers: seq_length_is_variable is false, and seq_length is missing; "
                                 "give it, or let the length vary")
            axis.part(length, "register_with_transformers")
        groups.set_mesh(mesh)
        if not isinstance(model_name_or_path, str):
            use_sequence_attention(model_name_or_path, axis, split_in_eval=not disable_in_eval, whole_loss=False)
        elif core_attn_implementation is None:
            raise UsageError("register_with_transformers: core_attn_implementation is missing; give the one that the model "
                             "is loaded with, such as 'sdpa', or the model itself")
        else:
            register_sequence_attention(core_attn_implementation,
                                        SequenceAttention(axis, split_in_eval=not disable_in_eval))
        return mesh


class UlyssesSPDataLoaderAdapter:
    """A loader whose batches are cut: each rank's own batch is read by all ranks of its sequence, one after the other.

    Of N batches, one on each of N ranks, come N batches on each rank, with 1/N of their positions: `input_ids`,
    `position_ids`, `shift_labels` in place of `labels`, and what else has the length of the sequence, padded to it.
    """

    @as_published
    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any):
        """Take a loader of dictionaries, the group, and the device that batches are moved to."""
        self.dl, self.device = dl, device
        self.sp_rank, self.sp_group, self.sp_world_size = sp_rank, sp_group, sp_world_size
        self._axis = SequenceAxis(sp_group)
        if (self._axis.rank, self._axis.ranks) != (sp_rank, sp_world_size):
            raise UsageError(f"UlyssesSPDataLoaderAdapter: got rank {sp_rank} of {sp_world_size}, and this is rank "
                             f"{self._axis.rank} of the {self._axis.ranks} of sp_group; give those of the group")

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield this rank's parts. Raises UsageError on all ranks where the loader of one ended first."""
        batches = iter(self.dl)
        while found := self._of_all_ranks(next(batches, None)):
            for whole in found:
                yield self._part(whole)

    @as_published
    def _of_all_ranks(self, mine: Any) -> list[Any]:
        """Return the batch of every rank, none where all loaders have ended."""
        if mine is not None and not isinstance(mine, Mapping):
            raise UsageError(f"UlyssesSPDataLoaderAdapter: the loader gave a {type(mine).__name__}; a batch is a dictionary "
                             f"with input_ids")
        found = self._axis.communicator.gather_objects(None if mine is None else _on_host(mine))
        if all(each is None for each in found):
            return []
        if None in found:
            raise UsageError(f"UlyssesSPDataLoaderAdapter: the loader of sequence rank {found.index(None)} has ended, and "
                             f"that of another has not; give every rank as many batches (drop_last, or a sampler that "
                             f"evens them)")
        return found

    def _part(self, whole: dict[str, Any]) -> dict[str, Any]:
        part = split_batch(whole, self._axis)
        part.pop("labels", None)
        return {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in part.items()}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader: scripts ask for its dataset, its sampler or `set_epoch`."""
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)


def _on_host(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in batch.items()}


class SeqAllToAll(torch.autograd.Function):
    """`single_all_to_all`, whose gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, group: Any, input: Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int = 0,
                *unused: Any) -> Tensor:
        """Exchange `input` over `group`; streams and handles have no effect."""
        ctx.group, ctx.dims, ctx.unused = group, (scatter_idx, gather_idx), len(unused)
        return _exchange(input, scatter_idx, gather_idx, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Exchange the gradient back."""
        scatter, gather = ctx.dims
        return None, _exchange(gradients[0], gather, scatter, ctx.group), None, None, None, *(None,) * ctx.unused


def _exchange(tensor: Tensor, scatter: int, gather: int, group: Any) -> Tensor:
    """Return the parts of dim `scatter` that are this rank's, of all ranks, joined along dim `gather`."""
    ranks = torch.distributed.get_world_size(group)
    if tensor.shape[scatter] % ranks:
        raise UsageError(f"single_all_to_all: dim {scatter} of {tuple(tensor.shape)} is not divided by the {ranks} ranks; "
                         f"take DistributedAttention, which shares any number of heads")
    sent = torch.stack(tensor.chunk(ranks, scatter)).contiguous()
    received = torch.empty_like(sent)
    comm.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), gather)


@as_published
def single_all_to_all(input: Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int, group: Any,
                      async_op: bool = False, handle: Any = None, type: Any = None,
                      num_kv_heads: int | None = None) -> Tensor:
    """Return this rank's part of dim `scatter_idx` of every rank's `input`, joined along dim `gather_idx`.

    Raises NotSupportedYet for `async_op`, UsageError where the ranks do not divide the dim.
    """
    if async_op:
        raise NotSupportedYet("single_all_to_all: async_op is not supported yet; leave it out")
    return _exchange(input, scatter_idx, gather_idx, group)
