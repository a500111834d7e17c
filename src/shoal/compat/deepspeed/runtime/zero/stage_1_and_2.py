"""The published optimizer of stages 1 and 2, and its memory estimators."""

from __future__ import annotations

from shoal.compat.optimizers import DeepSpeedZeroOptimizer as DeepSpeedZeroOptimizer
from shoal.zero import estimate_zero2_model_states_mem_needs_all_cold as estimate_zero2_model_states_mem_needs_all_cold
from shoal.zero import estimate_zero2_model_states_mem_needs_all_live as estimate_zero2_model_states_mem_needs_all_live


def estimate_zero2_model_states_mem_needs(total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                          cpu_offload: bool = True, additional_buffer_factor: float = 1.5,
                                          ) -> tuple[int, int]:
    """Return the published estimate of bytes (host, GPU) at stage 2."""
    ranks = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * ranks, 16) * additional_buffer_factor), 2 * total_params
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), 2 * total_params + int(
        18 * total_params / ranks)
