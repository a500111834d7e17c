"""Whether the packages are there to which monitors write."""

from __future__ import annotations

from importlib import import_module

__all__ = ["check_comet_availability", "check_tb_availability", "check_wandb_availability"]


def _import(package: str) -> None:
    try:
        import_module(package)
    except ImportError as error:
        raise ModuleNotFoundError(f"No module named '{package}': a monitor of the configuration writes to it; install it, "
                                  "or disable the monitor") from error


def check_tb_availability() -> None:
    """Raise ModuleNotFoundError without the package tensorboard."""
    _import("tensorboard")


def check_wandb_availability() -> None:
    """Raise ModuleNotFoundError without the package wandb."""
    _import("wandb")


def check_comet_availability() -> None:
    """Raise ModuleNotFoundError without the package comet_ml."""
    _import("comet_ml")
