"""Sends and receives between adjacent pipeline stages, for scripts that run a schedule of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shoal.compat.deepspeed.comm import comm
from shoal.compat.deepspeed.runtime.pipe.topology import PipelineParallelGrid
from shoal.errors import UsageError
from shoal.tree import tree_map

__all__ = ["can_send_recv", "init_process_groups", "recv", "recv_obj", "send", "send_obj", "wait"]


class _State:
    """The grid of this process, and what is under way."""

    def __init__(self) -> None:
        self.grid: PipelineParallelGrid | None = None
        self.works: list[Any] = []

    def peer(self, stage: int) -> int:
        """Return the rank of an adjacent stage; raises `AssertionError` for another one."""
        if self.grid is None:
            raise UsageError("p2p: there is no grid; call init_process_groups(grid) first")
        distance = abs(self.grid.stage_id - stage)
        assert distance in (1, self.grid.pipe_parallel_size - 1), (
            f"p2p: stage {self.grid.stage_id} and stage {stage} are not adjacent; pass values from stage to stage")
        return self.grid.stage_to_global(stage)


_state = _State()


def can_send_recv() -> bool:
    """Return True: torch sends between two ranks."""
    return True


def init_process_groups(grid: PipelineParallelGrid) -> None:
    """Send and receive along the pipeline of `grid` from now on."""
    _state.grid = grid


def send(tensor: Tensor, dest_stage: int, async_op: bool = False) -> Any:
    """Send a tensor to an adjacent stage; with `async_op`, until `wait`."""
    return _start(comm.isend, tensor, _state.peer(dest_stage)) if async_op else comm.send(tensor, _state.peer(dest_stage))


def recv(tensor: Tensor, src_stage: int, async_op: bool = False) -> Any:
    """Receive into a tensor from an adjacent stage; with `async_op`, until `wait`."""
    return _start(comm.irecv, tensor, _state.peer(src_stage)) if async_op else comm.recv(tensor, _state.peer(src_stage))


def _start(begin: Any, tensor: Tensor, peer: int) -> Any:
    work = begin(tensor, peer)
    _state.works.append(work)
    return work


def send_obj(msg: Any, dest: int) -> None:
    """Send a Python object to a rank, which calls `recv_obj`."""
    comm.send_object_list([msg], dst=dest)


def recv_obj(sender: int) -> Any:
    """Receive the object that a rank sends by `send_obj`; its tensors are on this rank's device."""
    received: list[Any] = [None]
    comm.recv_object_list(received, src=sender)
    return tree_map(lambda tensor: tensor.to(get_accelerator().current_device_name()), received[0])


def wait() -> None:
    """Wait for all that `async_op` started."""
    while _state.works:
        _state.works.pop(0).wait()
