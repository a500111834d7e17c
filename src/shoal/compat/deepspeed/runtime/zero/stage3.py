"""The published optimizer of stage 3, its memory estimators, and the context of generation."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from shoal.compat.optimizers import DeepSpeedZeroOptimizer_Stage3 as DeepSpeedZeroOptimizer_Stage3
from shoal.zero import estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold
from shoal.zero import estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live
from shoal.zero.gathered import gathered


def estimate_zero3_model_states_mem_needs(total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1,
                                          num_nodes: int = 1, cpu_offload: bool = True, cpu_offload_params: bool = True,
                                          zero_init: bool = True, additional_buffer_factor: float = 1.5,
                                          ) -> tuple[int, int, int]:
    """Return the published estimate of bytes (host, GPU, of which the largest layer) at stage 3."""
    ranks, largest = num_nodes * num_gpus_per_node, 4 * largest_layer_params
    if cpu_offload:
        resident = 18 if cpu_offload_params else 16
        gpu = largest if cpu_offload_params else largest + int(2 * total_params / ranks)
        share = resident / num_nodes if zero_init else max(4 * num_gpus_per_node, resident / num_nodes)
        return int(total_params * share * additional_buffer_factor), gpu, largest
    host = (largest if zero_init else 4 * total_params) * num_gpus_per_node * additional_buffer_factor
    return int(host), largest + int(18 * total_params / ranks), largest


@contextmanager
def unwrap_model_for_generation(model: Any) -> Generator[Any]:
    """Yield the module of an engine, gathered whole."""
    module = getattr(model, "module", model)
    with gathered(module):
        yield module
