"""DeepSpeed's published estimates of the memory that model state needs, for scripts that call them by name.

They assume 16-bit training with Adam: 2 bytes of weight, 2 of gradient kept as 4 with the master copy, 12 of master and
moments. With P parameters, L of them in the largest layer, g ranks a node, n nodes, G = g n and a factor f for other host
buffers:

    stage 2, optimizer on the host         device 2 P             host P max(4 G, 16) f
    stage 2, nothing on the host           device 2 P + 18 P / G  host 4 P g f
    stage 3, weights, optimizer on host    device 4 L             host P max(b, 18 / n) f
    stage 3, optimizer on the host         device 4 L + 2 P / G   host P max(b, 16 / n) f
    stage 3, nothing on the host           device 4 L + 18 P / G  host 4 g f (L if built under Init else P)

where b is 0 for a model built under `zero.Init` and 4 g for one that every rank of a node builds whole. What this library
needs, `shoal.plan.estimate` says.
"""

from __future__ import annotations

from torch import nn

from shoal.config.sizes import format_bytes

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]


def estimate_zero2_model_states_mem_needs(total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                          cpu_offload: bool = True,
                                          additional_buffer_factor: float = 1.5) -> tuple[int, int]:
    """Return DeepSpeed's estimate for stage 2 as bytes (of a node's host memory, of one device's memory)."""
    ranks = num_gpus_per_node * num_nodes
    if cpu_offload:
        return int(total_params * max(4 * ranks, 16) * additional_buffer_factor), 2 * total_params
    host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), 2 * total_params + 18 * total_params // ranks


def estimate_zero3_model_states_mem_needs(total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1,
                                          num_nodes: int = 1, cpu_offload: bool = True,
                                          cpu_offload_params: bool = True, zero_init: bool = True,
                                          additional_buffer_factor: float = 1.5) -> tuple[int, int, int]:
    """Return DeepSpeed's estimate for stage 3 as bytes (of a node's host memory, of one device's, of the largest layer).

    Weights move to the host only together with the optimizer: `cpu_offload_params` counts where `cpu_offload` is set.
    """
    ranks = num_gpus_per_node * num_nodes
    largest = 4 * largest_layer_params
    if not cpu_offload:
        built = largest_layer_params if zero_init else total_params
        host = built * 4 * num_gpus_per_node * additional_buffer_factor
        return int(host), largest + 18 * total_params // ranks, largest
    whole = 0 if zero_init else 4 * num_gpus_per_node
    kept, device = (18, 0) if cpu_offload_params else (16, 2 * total_params // ranks)
    return int(total_params * max(whole, kept / num_nodes) * additional_buffer_factor), largest + device, largest


def estimate_zero2_model_states_mem_needs_all_live(model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                                   additional_buffer_factor: float = 1.5) -> None:
    """Print DeepSpeed's stage 2 estimates of `model` for every choice of offload."""
    estimate_zero2_model_states_mem_needs_all_cold(_num_parameters(model), num_gpus_per_node, num_nodes,
                                                   additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                                   additional_buffer_factor: float = 1.5) -> None:
    """Print DeepSpeed's stage 2 estimates of a model of `total_params` parameters for every choice of offload."""
    rows: list[tuple[int, int, str]] = []
    for offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(total_params, num_gpus_per_node, num_nodes, offload,
                                                             additional_buffer_factor)
        rows.append((host, device, f"offload_optimizer={_tier(offload)}"))
    _print_estimates(f"stage 2: {total_params:,} parameters", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1,
                                                   additional_buffer_factor: float = 1.5) -> None:
    """Print DeepSpeed's stage 3 estimates of `model` for every choice of offload and of `zero.Init`."""
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    estimate_zero3_model_states_mem_needs_all_cold(_num_parameters(model), largest, num_gpus_per_node, num_nodes,
                                                   additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(total_params: int, largest_layer_params: int,
                                                   num_gpus_per_node: int = 1, num_nodes: int = 1,
                                                   additional_buffer_factor: float = 1.5) -> None:
    """Print DeepSpeed's stage 3 estimates of a model of `total_params` for every choice of offload and `zero.Init`.

    `largest_layer_params` counts the parameters that the largest single layer holds itself.
    """
    rows: list[tuple[int, int, str]] = []
    for optimizer, weights in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params, largest_layer_params, num_gpus_per_node, num_nodes, optimizer, weights, init,
                additional_buffer_factor)
            rows.append((host, device, f"offload_param={_tier(weights)}, offload_optimizer={_tier(optimizer)}, "
                                       f"zero_init={int(init)}"))
    title = f"stage 3: {total_params:,} parameters, {largest_layer_params:,} in the largest layer"
    _print_estimates(title, num_gpus_per_node, num_nodes, rows)


def _print_estimates(title: str, ranks_per_node: int, nodes: int, rows: list[tuple[int, int, str]]) -> None:
    """Print a line for each choice of offload: (bytes of a node's host memory, bytes of one device, the options)."""
    print(f"{title}; {nodes} x {ranks_per_node} ranks\n{'host, per node':>14}  {'per device':>10}  options")
    for host, device, options in rows:
        print(f"{format_bytes(host):>14}  {format_bytes(device):>10}  {options}")


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _tier(offload: bool) -> str:
    return "cpu" if offload else "none"
