"""NVIDIA and AMD devices under torch.cuda."""

from __future__ import annotations

from typing import Any

from shoal.compat.device_accelerator import DeviceAccelerator

__all__ = ["CUDA_Accelerator"]


class CUDA_Accelerator(DeviceAccelerator):
    """The devices of torch.cuda, with the services that this kind alone has."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def is_bf16_supported(self) -> bool:
        return self.module_function("is_bf16_supported")()

    def is_fp16_supported(self) -> bool:
        return self._capability() >= 7

    def is_fp64_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return self._capability() >= 8

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        return self.module_function("nvtx").range_push(msg)

    def range_pop(self, domain: Any = None) -> Any:
        return self.module_function("nvtx").range_pop()

    def lazy_call(self, callback: Any) -> Any:
        return self.module_function("_lazy_call")(callback)

    def create_graph(self) -> Any:
        return self.module_function("CUDAGraph")()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return self.module_function("graph")(graph, pool, stream)

    def is_current_stream_capturing(self) -> bool:
        return self.module_function("is_current_stream_capturing")()

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"]

    def _capability(self) -> int:
        return self.module_function("get_device_capability")()[0]
