"""The device of this process under its published names."""

from shoal.compat.lazy import lazy_names

_HERE = __name__

__getattr__, __dir__ = lazy_names(_HERE, {
    "DeepSpeedAccelerator": f"{_HERE}.abstract_accelerator",
    "get_accelerator": f"{_HERE}.real_accelerator",
    "set_accelerator": f"{_HERE}.real_accelerator",
    "is_current_accelerator_supported": f"{_HERE}.real_accelerator",
})
