"""Objects of DeepSpeed's classes, written into a file of `torch.save` by name, where the classes are not installed.

DeepSpeed saves its loss scaler and the addresses of fragments as objects, and expects them. Python's pickler refuses a class
that cannot be imported; ours writes the name.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["fragment_address", "loss_scaler", "save_archive"]

STATIC, DYNAMIC = (type(name, (), {"__module__": "deepspeed.runtime.fp16.loss_scaler"})
                   for name in ("LossScaler", "DynamicLossScaler"))
ADDRESS = type("fragment_address", (), {"__module__": "deepspeed.utils.tensor_fragment"})
WRITTEN_BY_NAME = (STATIC, DYNAMIC, ADDRESS)


def loss_scaler(state: Mapping[str, float]) -> object:
    """Return DeepSpeed's loss scaler for the state of Shoal's (empty: a static scale of 1)."""
    scaler = object.__new__(DYNAMIC if state else STATIC)
    vars(scaler).update({
        "cur_scale": state["value"], "dynamic": True, "cur_iter": state["steps"], "scale_factor": 2.0, "scale_window": 1000,
        "last_overflow_iter": state["steps"] - state["clean"] - 1, "min_scale": 1, "delayed_shift": 2,
        "cur_hysteresis": state["patience"], "consecutive_hysteresis": False, "raise_error_at_min_scale": True,
        "dtype": torch.float16} if state else {"cur_scale": 1.0, "dynamic": False})
    return scaler


def fragment_address(count: int, start: int) -> object:
    """Return DeepSpeed's record of the place of a fragment in a flat buffer."""
    address = object.__new__(ADDRESS)
    vars(address).update({"numel": count, "start": start})
    return address


def save_archive(value: object, path: Path) -> None:
    """Write `value` as `torch.save` does."""
    torch.save(value, path, pickle_module=SimpleNamespace(Pickler=_Pickler, __name__=__name__))


_PythonPickler: Any = vars(pickle)["_Pickler"]
"""Python's pickler in Python: that in C has no hook for the names of classes, and typeshed does not describe this one."""


class _Pickler(_PythonPickler):
    """Writes the names of the classes above without importing them."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if any(obj is kind for kind in WRITTEN_BY_NAME):
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__name__}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)
