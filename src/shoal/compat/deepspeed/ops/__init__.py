"""The published optimizers and op builders."""

from shoal.compat.lazy import lazy_names

_HERE = __name__

__compatible_ops__ = {
    **dict.fromkeys(("cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion", "async_io", "utils",
                     "transformer", "stochastic_transformer"), True),
    **dict.fromkeys(("transformer_inference", "quantizer", "random_ltd",
                     "spatial_inference", "gds", "evoformer_attn", "fp_quantizer", "sparse_attn", "deepspeed_ccl_comm",
                     "deepspeed_shm_comm", "inference_core_ops", "cutlass_ops", "ragged_device_ops", "ragged_ops", "dc"),
                    False),
}
"""Which native code is there, by the names of the builders."""

__getattr__, __dir__ = lazy_names(_HERE, {
    **{f"DeepSpeedTransformer{kind}": f"{_HERE}.transformer" for kind in ("Config", "Layer")}})
