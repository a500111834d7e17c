"""Build modules on another device, in another dtype."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["OnDevice"]

_CREATE = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.tensor, torch.arange,
                     torch.eye})


class _Dtype(TorchFunctionMode):
    """Gives new floating-point tensors a dtype and a device."""

    def __init__(self, dtype: torch.dtype, device: Any):
        super().__init__()
        self._dtype, self._device = dtype, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _CREATE:
            if kwargs.get("device") is None:
                kwargs["device"] = self._device
            made = func(*args, **kwargs)
            return made.to(self._dtype) if made.is_floating_point() else made
        return func(*args, **kwargs)


class OnDevice:
    """Context in which new floating-point tensors have `dtype` and lie on `device`; by default they have no memory."""

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True):
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._mode: _Dtype | None = None

    def __enter__(self) -> Self:
        if self.enabled:
            self._mode = _Dtype(self.dtype, self.device)
            self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(kind, error, trace)
