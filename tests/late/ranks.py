"""Ranks of tests on another device: `with ranks_on(prepare)`, or SHOAL_TEST_DEVICE=late or cuda for all tests of a run.

SHOAL_TEST_SEED chooses the order of the late device's tasks; rank r draws from the seed and r. On CUDA, where there are more
ranks than GPUs they share them, and collectives go through the host ("staged"): NCCL refuses two ranks on one GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from shoal.device import set_current
from tests.late.device import NAME, seed
from tests.late.group import BACKEND, STAGED, register, register_staged
from tests.late.operands import move_operands

__all__ = ["PRELOADED_ON", "SUITES_ON", "prepare", "prepare_staged"]


def prepare() -> str:
    """Load the late device in this rank and return the backend of its process groups."""
    register()
    number = int(os.environ.get("SHOAL_TEST_SEED", "0"))
    seed(number and number * 1000 + int(os.environ["RANK"]))
    return BACKEND


def prepare_staged() -> str:
    """Load the late device in this rank, and return the backend of groups whose collectives go through the host."""
    prepare()
    register_staged(NAME)
    return f"cpu:gloo,{NAME}:{STAGED}"


def _prepare_late() -> str:
    backend = prepare()
    move_operands()
    return backend


def _prepare_cuda() -> str:
    gpus, ranks = torch.accelerator.device_count(), int(os.environ["WORLD_SIZE"])
    set_current(torch.device("cuda", int(os.environ["RANK"]) % gpus))
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % gpus)
    move_operands()
    if ranks <= gpus:
        return "cpu:gloo,cuda:nccl"
    register_staged("cuda")
    return f"cpu:gloo,cuda:{STAGED}"


SUITES_ON: dict[str, Callable[[], str]] = {"late": _prepare_late, "cuda": _prepare_cuda}
"""What prepares a rank for tests that were written for the CPU, by device."""

PRELOADED_ON: dict[str, tuple[str, ...]] = {"late": ("tests.late.preloaded",), "cuda": ()}
"""Modules that the fork server of such a run imports, by device. (A process that has used CUDA cannot fork.)"""
