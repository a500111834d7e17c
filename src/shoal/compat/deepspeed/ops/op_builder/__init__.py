"""Published builders of native code, for scripts that ask what is built.

Shoal builds its own code at first use, and has a torch fallback for each function; so the optimizers' builders are
compatible everywhere, and have nothing to load.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from shoal.compat.deepspeed.ops.op_builder.builder import OpBuilder as OpBuilder
from shoal.errors import NotSupportedYet

_AVAILABLE = {"CPUAdamBuilder": "cpu_adam", "CPUAdagradBuilder": "cpu_adagrad", "CPULionBuilder": "cpu_lion",
              "FusedAdamBuilder": "fused_adam", "FusedLambBuilder": "fused_lamb", "FusedLionBuilder": "fused_lion",
              "AsyncIOBuilder": "async_io", "UtilsBuilder": "utils", "TransformerBuilder": "transformer",
              "StochasticTransformerBuilder": "stochastic_transformer"}
_MISSING = {"InferenceBuilder": "transformer_inference", "QuantizerBuilder": "quantizer", "RandomLTDBuilder": "random_ltd",
            "SpatialInferenceBuilder": "spatial_inference", "GDSBuilder": "gds", "EvoformerAttnBuilder": "evoformer_attn",
            "FPQuantizerBuilder": "fp_quantizer", "SparseAttnBuilder": "sparse_attn", "CCLCommBuilder": "deepspeed_ccl_comm",
            "ShareMemCommBuilder": "deepspeed_shm_comm", "NotImplementedBuilder": "deepspeed_not_implemented",
            "InferenceCoreBuilder": "inference_core_ops", "InferenceCutlassBuilder": "cutlass_ops",
            "RaggedOpsBuilder": "ragged_device_ops", "RaggedUtilsBuilder": "ragged_ops", "DeepCompileBuilder": "dc"}


def _load(self: OpBuilder, verbose: bool = True) -> ModuleType:
    raise NotSupportedYet(f"{type(self).__name__}.load: Shoal's native code is called by its own classes alone")


def _builder(class_name: str, name: str, compatible: bool) -> type[OpBuilder]:
    namespace: dict[str, Any] = {"NAME": name, "BUILD_VAR": f"DS_BUILD_{name.upper()}", "COMPATIBLE": compatible,
                                 "load": _load, "__module__": __name__,
                                 "__doc__": f"The builder of '{name}'; {'there' if compatible else 'not there'}."}
    return type(class_name, (OpBuilder,), namespace)


ALL_OPS: dict[str, OpBuilder] = {}
for _names, _there in ((_AVAILABLE, True), (_MISSING, False)):
    for _class_name, _op in _names.items():
        globals()[_class_name] = _builder(_class_name, _op, _there)
        ALL_OPS[_op] = globals()[_class_name]()
