"""The environment variables that the published package reads, and Shoal itself does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["accelerator", "elasticity_config", "host_memory", "local_size", "number", "on_azure", "on_dlts", "on_sagemaker",
           "patch_azure", "patch_sagemaker", "timeout_minutes"]


def accelerator() -> str | None:
    """Return the device that DS_ACCELERATOR names, None where it is not set."""
    return os.environ.get("DS_ACCELERATOR") or None


def elasticity_config() -> dict[str, Any] | None:
    """Return the section `elasticity` that a scheduler planned with, None where it tells of none."""
    text = os.environ.get("DEEPSPEED_ELASTICITY_CONFIG")
    return None if text is None else json.loads(text)


def local_size() -> int:
    """Return the number of ranks on this host, by LOCAL_SIZE of the launcher or LOCAL_WORLD_SIZE of torchrun; else 1."""
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 1


def number(*names: str, default: int) -> int:
    """Return the number in the first of these variables that is set."""
    return next((int(os.environ[name]) for name in names if name in os.environ), default)


def on_azure() -> bool:
    """Whether Azure's machine learning service started this process."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def on_sagemaker() -> bool:
    """Whether Amazon's SageMaker started this process."""
    return "SM_TRAINING_ENV" in os.environ


def patch_azure(master_port: int) -> None:
    """Set the variables of torch.distributed from those of Azure's service, which starts ranks by Open MPI.

    On one node `master_port` is the port of rank 0, on several Azure names address and port. Raises KeyError for a
    variable that Azure did not set.
    """
    given = os.environ
    given["RANK"] = given["OMPI_COMM_WORLD_RANK"]
    given["WORLD_SIZE"] = given["OMPI_COMM_WORLD_SIZE"]
    if given["OMPI_COMM_WORLD_LOCAL_SIZE"] == given["WORLD_SIZE"]:
        given["MASTER_ADDR"], given["MASTER_PORT"] = given["AZ_BATCHAI_MPI_MASTER_NODE"], str(master_port)
    else:
        given["MASTER_ADDR"], _, port = given["AZ_BATCH_MASTER_NODE"].partition(":")
        given.setdefault("MASTER_PORT", port or str(master_port))
    given["NCCL_SOCKET_IFNAME"] = "^docker0,lo"
    given["LOCAL_RANK"] = given["OMPI_COMM_WORLD_LOCAL_RANK"]


def patch_sagemaker() -> None:
    """Set the variables of torch.distributed from those of Open MPI, by which SageMaker starts ranks."""
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = os.environ[f"OMPI_COMM_WORLD_{name}"]
    os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]


def on_dlts() -> bool:
    """Whether Microsoft's deep learning training service started this process."""
    return "DLTS_JOB_ID" in os.environ


def host_memory() -> tuple[int, int]:
    """Return the bytes of this host's memory that are in use, and all of them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total - free, total


def timeout_minutes() -> float:
    """Return DEEPSPEED_TIMEOUT, the minutes that a collective may take; 10 if it is not set."""
    return float(os.environ.get("DEEPSPEED_TIMEOUT", "10"))
