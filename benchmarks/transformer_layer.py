"""Layers of `shoal.nn` beside Hugging Face's and torch's: time, saved bytes and the memory of the loss.

    python benchmarks/transformer_layer.py [--rounds 5] [--parts layer passes loss step] [--compile] [--processor-time]

Forward and backward in fp32, one thread. Ways of one comparison take turns, after a turn that is not counted; a row is the
median of the rounds, and a ratio the median of the ratios of the rounds. With `--processor-time` the clock counts the
process's own time, for machines that others use too. `layer`: hidden 768, 12 heads, batch 4 x 512 tokens, beside BertLayer
with SDPA. `passes`: each fused pass of shoal.nn over as many hidden states (4 x as wide for GELU and SwiGLU; a quarter of
the tokens for the cross entropy). `loss`: GPT-2's head of 50,257 words. `step`: the 30m GPT of examples/gpt,
4 x 256 tokens, with and without `"kernels": {"linear": "auto"}`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from results import Outcome, Sheet, Target
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import workload

from shoal.nn import (
    TiledLoss,
    TransformerConfig,
    TransformerLayer,
    bias_gelu,
    cross_entropy,
    dropout_add_norm,
    inject_transformer_layers,
    rms_norm,
    rotary,
    set_linear_kernels,
    swiglu,
    tiled_cross_entropy,
)
from shoal.nn.probe import choose, describe
from shoal.products import TORCH

HIDDEN, HEADS, BATCH, LENGTH = 768, 12, 4, 512
WORDS, TOKENS = 50_257, BATCH * LENGTH
MEBI = 1 << 20

_PARTS = ("layer", "passes", "loss", "step")

Turn = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Ways that take turns; the first is the peer. `least` are the ratios that are asked for."""

    title: str
    ways: Mapping[str, Turn]
    least: Mapping[str, float]


def bert_layer(dropout: float) -> nn.Module:
    """Return Hugging Face's BERT layer with SDPA."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=8, hidden_size=HIDDEN, num_attention_heads=HEADS, intermediate_size=4 * HIDDEN,
                        num_hidden_layers=1, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return BertModel._from_config(config, attn_implementation="sdpa").encoder.layer[0].train()


def layer_ways(dropout: float, compiled: bool) -> dict[str, nn.Module]:
    """Return the layers that are compared, by name."""
    plain = bert_layer(dropout)
    injected, products = copy.deepcopy(plain), copy.deepcopy(plain)
    inject_transformer_layers(injected)
    set_linear_kernels(products, "auto")
    own = TransformerLayer(TransformerConfig(
        hidden_size=HIDDEN, heads=HEADS, num_hidden_layers=12, initializer_range=0.02, attn_dropout_ratio=dropout,
        hidden_dropout_ratio=dropout, pre_layer_norm=False, normalize_invertible=True, gelu_checkpoint=True,
        attn_dropout_checkpoint=True))
    torchs = copy.deepcopy(plain)
    inject_transformer_layers(torchs, kernels="torch")
    ways = {"BertLayer, SDPA": plain, "BertLayer, kernels.linear auto": products, "injected, torch's products": torchs,
            "injected": injected, "TransformerLayer": own}
    if compiled:
        ways["BertLayer, torch.compile"] = torch.compile(copy.deepcopy(plain))  # pyright: ignore[reportArgumentType]
    return ways


def passes(layer: nn.Module) -> Turn:
    """Return a turn: forward and backward of the layer."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=generator).requires_grad_()
    gradient = torch.randn(x.shape, generator=generator)

    def turn() -> None:
        layer.zero_grad()
        layer(x).backward(gradient)

    return turn


def saved_bytes(layer: nn.Module) -> int:
    """Return the bytes of the storages that autograd holds between the passes of `layer`, parameters apart."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(BATCH, LENGTH, HIDDEN, requires_grad=True))
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def loss_ways() -> dict[str, Turn]:
    """Return the ways from hidden states to the gradients of a cross entropy."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN, requires_grad=True), (torch.randn(WORDS, HIDDEN) * 0.02).requires_grad_()
    targets = torch.randint(WORDS, (TOKENS,))

    def clear() -> None:
        hidden.grad = weight.grad = None

    def plain() -> None:
        clear()
        F.cross_entropy(F.linear(hidden, weight), targets).backward()

    def tiled(auto: bool, recompute: bool | None = None) -> Turn:
        def turn() -> None:
            clear()
            tiled_cross_entropy(hidden, weight, targets, loss=TiledLoss(recompute=recompute),
                                products=choose("auto") if auto else TORCH).backward()
        return turn

    return {"whole logits": plain, "tiles, torch's products": tiled(False), "tiles": tiled(True),
            "tiles, recomputed": tiled(True, True)}


def fused_ways() -> dict[str, dict[str, Turn]]:
    """Return, of each fused pass, its forward and backward by torch's operations and by `shoal.nn`."""
    torch.manual_seed(0)
    x, y, gain, shift = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN), torch.ones(HIDDEN), torch.zeros(HIDDEN)
    wide, wider, bias = torch.randn(TOKENS, 4 * HIDDEN), torch.randn(TOKENS, 4 * HIDDEN), torch.zeros(4 * HIDDEN)
    angles = torch.randn(LENGTH, HIDDEN // HEADS // 2)
    heads, cosines, sines = torch.randn(BATCH, HEADS, LENGTH, HIDDEN // HEADS), angles.cos(), angles.sin()
    double = [torch.cat([each, each], -1) for each in (cosines, sines)]
    logits, targets = torch.randn(TOKENS // 4, WORDS), torch.randint(WORDS, (TOKENS // 4,))

    def norm(x: Tensor, y: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(F.dropout(x + shift, 0.1) + y, (HIDDEN,), gain, shift)

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * double[0] + torch.cat([-high, low], -1) * double[1]

    def turn(operation: Callable[..., Tensor], *operands: Tensor) -> Turn:
        leaves = [each.clone().requires_grad_() for each in operands]
        gradient = torch.randn_like(operation(*leaves))

        def run() -> None:
            torch.autograd.grad(operation(*leaves), leaves, gradient)

        return run

    def both(torchs: Callable[..., Tensor], mine: Callable[..., Tensor], *operands: Tensor) -> dict[str, Turn]:
        return {"torch": turn(torchs, *operands), "shoal.nn": turn(mine, *operands)}

    return {
        "bias_gelu": both(lambda x, b: F.gelu(x + b), bias_gelu, wide, bias),
        "dropout_add_norm": both(norm, lambda x, y, g, s: dropout_add_norm(x, y, g, s, bias=s, dropout=0.1),
                                 x, y, gain, shift),
        "rms_norm": both(lambda x, g: F.rms_norm(x, (HIDDEN,), g, 1e-6), rms_norm, x, gain),
        "swiglu": both(lambda g, u: F.silu(g) * u, swiglu, wide, wider),
        "rotary": both(rotated, lambda x: rotary(x, cosines, sines), heads),
        "cross_entropy": both(lambda z: F.cross_entropy(z, targets), lambda z: cross_entropy(z, targets), logits)}


def peak(turn: Turn) -> float:
    """Return by how many MiB a turn raises this process's resident memory, at most."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    turn()
    return _status("VmHWM") - before


def peak_alone(name: str) -> float:
    """Return the `peak` of the way `name` of the loss, in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--peak", name], check=True, capture_output=True, text=True)
    return float(done.stdout)


def _status(key: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def step_ways() -> dict[str, Turn]:
    """Return the pass and step of a GPT with torch's products, and with those that the probe chose."""
    spine = workload("30m", microbatch=4, length=256)
    torch.manual_seed(0)
    plain = spine.build()
    mine = copy.deepcopy(plain)
    set_linear_kernels(mine, "auto")
    tokens, targets = spine.batch(0, 0)

    def turn(model: nn.Module) -> Turn:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def run() -> None:
            optimizer.zero_grad()
            spine.loss(model(tokens), targets).backward()
            optimizer.step()

        return run

    return {"torch's products": turn(plain), "kernels.linear auto": turn(mine)}


def measure(comparison: Comparison, rounds: int, clock: Callable[[], float],
            ) -> tuple[Sheet, list[Target], dict[str, object]]:
    """Let the ways take turns; return the table, the targets and the seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in comparison.ways}
    for turn in range(rounds + 1):
        for name, way in comparison.ways.items():
            begun = clock()
            way()
            if turn:
                seconds[name].append(clock() - begun)
    peer = next(iter(seconds.values()))
    ratios = {name: [theirs / own for theirs, own in zip(peer, found, strict=True)] for name, found in seconds.items()}
    rows = tuple((name, f"{1e3 * statistics.median(found):.0f}", f"{1e3 * min(found):.0f}",
                  f"{statistics.median(ratios[name]):.2f}")
                 for name, found in seconds.items())
    targets = [Target.over(ratios[name], what=f"{comparison.title}: {name}, times faster", low=least)
               for name, least in comparison.least.items()]
    return Sheet(title=comparison.title, columns=("way", "median ms", "best ms", "times the first"), rows=rows), targets, {
        "seconds": seconds}


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    if options.peak:
        sys.stdout.write(f"{peak(loss_ways()[options.peak])}\n")
        return
    clock = time.process_time if options.processor_time else time.perf_counter
    sheets, targets, raw = list[Sheet](), list[Target](), dict[str, object]()

    def add(comparison: Comparison) -> None:
        sheet, found, seconds = measure(comparison, options.rounds, clock)
        sheets.append(sheet)
        targets.extend(found)
        raw[comparison.title] = seconds

    if "layer" in options.parts:
        for dropout, least in ((0.0, 1.7), (0.1, 1.9)):
            layers = layer_ways(dropout, options.compile)
            add(Comparison(title=f"a layer, dropout {dropout:g}", least={"TransformerLayer": least},
                           ways={name: passes(layer) for name, layer in layers.items()}))
        saved = {name: saved_bytes(layer) / 1e6 for name, layer in layer_ways(0.1, compiled=False).items()}
        sheets.append(Sheet(title="saved between the passes, dropout 0.1", columns=("way", "MB"),
                            rows=tuple((name, f"{found:.1f}") for name, found in saved.items())))
        targets.append(Target(what="saved by TransformerLayer, dropout 0.1, all options", measured=saved["TransformerLayer"],
                              high=90, unit=" MB"))
    if "loss" in options.parts:
        ways = loss_ways()
        peaks = {name: peak_alone(name) for name in ways}
        add(Comparison(title="the loss, time", ways=ways, least={"tiles, torch's products": 1 / 1.05, "tiles": 1.5}))
        sheets.append(Sheet(title="the loss, growth of the peak", columns=("way", "MiB"),
                            rows=tuple((name, f"{found:.0f}") for name, found in peaks.items())))
        targets.append(Target(what="memory of the loss in tiles, of whole logits",
                              measured=peaks["tiles"] / peaks["whole logits"], high=1 / 3))
    if "passes" in options.parts:
        for name, ways in fused_ways().items():
            add(Comparison(title=name, ways=ways, least={"shoal.nn": 1.0}))
    if "step" in options.parts:
        add(Comparison(title="a step of a GPT", ways=step_ways(), least={"kernels.linear auto": 1.4}))
    note = (f"fp32, one thread; {options.rounds} rounds; {'processor time' if options.processor_time else 'wall time'}. "
            f"The probe chose: {describe(choose('auto'))}.")
    Outcome(benchmark="transformer_layer", command=" ".join(["python", *sys.argv]), note=note, sheets=tuple(sheets),
            targets=tuple(targets), raw=raw).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (5)")
    parser.add_argument("--parts", nargs="+", default=_PARTS, choices=_PARTS)
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile of the BertLayer")
    parser.add_argument("--processor-time", action="store_true", help="count the process's own time, not the clock's")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/transformer_layer.json)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
