"""The published pipeline runtime."""

from shoal.compat.lazy import lazy_names

_HERE = __name__

__getattr__, __dir__ = lazy_names(_HERE, {
    **{name: f"{_HERE}.module" for name in ("LayerSpec", "PipelineModule", "TiedLayerSpec")},
    "ProcessTopology": f"{_HERE}.topology",
})
