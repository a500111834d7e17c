"""Published helpers."""

from shoal.compat.lazy import lazy_names

_HERE = __name__

__getattr__, __dir__ = lazy_names(_HERE, {
    "logger": f"{_HERE}.logging",
    "log_dist": f"{_HERE}.logging",
    "log_dist_once": f"{_HERE}.logging",
    "set_log_level_from_string": f"{_HERE}.logging",
})
