"""Which kernel computes each product of a linear layer: a probe times them once per machine, and a file keeps what it found.

    {"torch 2.13.0, AMD EPYC, AVX512, 1 thread(s), processor time": {"forward": {"torch": 92.1, "onednn": 188.0}, ...}}

oneDNN is taken for a product where it is 5 % faster than torch: then the timing's noise does not decide, and a machine
without a difference has torch's bits. The rates of one thread are GFLOP in a second of processor time: beside other
processes, wall time gave 10 to 18 for kernels of 70 to 105. The probe takes about a second. Processes of one
machine wait for the first of them to finish it, so that all choose alike.
"""

from __future__ import annotations

import fcntl
import json
import platform
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from shoal.device import HOST
from shoal.errors import ConfigError
from shoal.log import logger
from shoal.native.build import cache_folder
from shoal.products import ONEDNN, TORCH, Kernel, Products, check_onednn, onednn_missing

__all__ = ["Choice", "Rates", "check_choice", "choose", "describe", "probed", "recorded"]

Choice = Literal["auto", "torch", "onednn"]

_ROWS, _INPUTS, _OUTPUTS = 512, 768, 1024
_ROUNDS = 5
_ADVANTAGE = 1.05

Rates = dict[str, dict[str, float]]
"""GFLOP of each kernel in a second, by product."""


def choose(choice: Choice, device: torch.device = HOST) -> Products:
    """Return the kernels that compute the products of fp32 tensors on `device`: off the host, torch's.

    Raises ConfigError for another choice, and for "onednn" where this torch does not have it.
    """
    check_choice(choice)
    if choice == "torch" or device.type != "cpu":
        return TORCH
    if choice == "onednn":
        return ONEDNN
    return probed(torch.get_num_threads())


def check_choice(choice: Choice) -> None:
    """Raise ConfigError for a choice that is none, or that this torch does not have."""
    if choice not in get_args(Choice):
        raise ConfigError(f"kernels.linear: got {choice!r}; choose {', '.join(map(repr, get_args(Choice)))}")
    if choice == "onednn":
        check_onednn("kernels.linear")


def describe(products: Products) -> str:
    """Return one line: the kernel of each product, and the rates that were measured."""
    chosen = [f"{name.replace('_', ' ')} {getattr(products, name)}" for name in _TRIALS]
    return "linear layers: " + ", ".join(chosen)


@cache
def probed(threads: int) -> Products:
    """Return the faster kernel of each product with this number of threads, from the file or measured now."""
    if (missing := onednn_missing()) is not None:
        logger.info("kernels.linear: torch computes the products of linear layers: %s", missing)
        return TORCH
    clock = ", processor time" if threads == 1 else ""
    rates = _rates(f"torch {torch.__version__}, {_processor()}, {threads} thread(s){clock}")
    products = _products(rates)
    logger.info("kernels.linear: %s", _measured(products, rates))
    return products


def recorded() -> list[str]:
    """Return what the probes of this machine chose, one line for each torch and number of threads; nothing is measured."""
    return [f"{key}: {_measured(_products(rates), rates)}" for key, rates in sorted(_read(_file()).items())]


def _measured(products: Products, rates: Rates) -> str:
    """Return one line: the kernel of each product, and the rates by which it was chosen."""
    measured = "; ".join(f"{name.replace('_', ' ')}: torch {found['torch']:.0f}, onednn {found['onednn']:.0f}"
                         for name, found in rates.items())
    return f"{describe(products)} (GFLOP/s {measured})"


def _products(rates: Rates) -> Products:
    faster: dict[str, Kernel] = {name: _faster(found) for name, found in rates.items()}
    return Products(forward=faster["forward"], input_gradient=faster["input_gradient"],
                    weight_gradient=faster["weight_gradient"])


def _faster(rates: dict[str, float]) -> Kernel:
    return "onednn" if rates["onednn"] > _ADVANTAGE * rates["torch"] else "torch"


def _rates(key: str) -> Rates:
    """Return the rates under `key` of the file, measured first where it has none."""
    try:
        with _locked(_file()) as path:
            known = _read(path)
            if key not in known:
                known[key] = _measure()
                path.write_text(json.dumps(known, indent=1))
            return known[key]
    except OSError as error:  # the folder cannot be written: this process measures for itself
        logger.info("kernels.linear: the probe is not kept: %s", error)
        return _measure()


def _file() -> Path:
    return cache_folder() / "linear.json"


@contextmanager
def _locked(path: Path) -> Generator[Path]:
    """Hold the lock of `path` between processes, which ends with the process too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path


def _read(path: Path) -> dict[str, Rates]:
    """Return the file's measurements; none where it is missing or damaged."""
    try:
        found = json.loads(path.read_text())
        return {key: {name: {kernel: float(rates[name][kernel]) for kernel in ("torch", "onednn")} for name in _TRIALS}
                for key, rates in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


_TRIALS: dict[str, Callable[[Products, Tensor, Tensor, Tensor], Tensor]] = {
    "forward": lambda products, x, weight, gradient: products.linear(x, weight),
    "input_gradient": lambda products, x, weight, gradient: products.gradient_of_input(gradient, weight),
    "weight_gradient": lambda products, x, weight, gradient: products.gradient_of_weight(gradient, x),
}
"""Each product, of x (rows, in), weight (out, in) and gradient (rows, out)."""


@torch.no_grad()
def _measure() -> Rates:
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in (
        (_ROWS, _INPUTS), (_OUTPUTS, _INPUTS), (_ROWS, _OUTPUTS)))
    flops = 2 * _ROWS * _INPUTS * _OUTPUTS
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    rates: Rates = {}
    for name, trial in _TRIALS.items():
        best = {"torch": float("inf"), "onednn": float("inf")}
        for turn in range(_ROUNDS + 1):  # in turns, so that a busy moment slows both; the first is not counted
            for kernel, products in (("torch", TORCH), ("onednn", ONEDNN)):
                begun = clock()
                trial(products, x, weight, gradient)
                if turn:
                    best[kernel] = min(best[kernel], clock() - begun)
        rates[name] = {kernel: flops / seconds / 1e9 for kernel, seconds in best.items()}
    return rates


def _processor() -> str:
    """Return the processor's name and instruction sets in short, which decide the kernels."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
