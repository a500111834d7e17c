"""Block-sparse attention beside dense attention, and beside Hugging Face's BigBird and Longformer: time and memory.

    python benchmarks/attention.py [--lengths 4096 8192 16384] [--rounds 3] [--threads 1] [--quick]
    python benchmarks/attention.py --device cuda

Forward and backward in fp32, 8 heads of 64, a window of 3 blocks and one global block. Ways of one length take turns; a row
is the median of the rounds, and a ratio is the median of the ratios of the rounds. "beside" rows give both sides one
structure: BigBird's window, global and random blocks of 64, with the module's projections of hidden states and without;
Longformer's window of 512 positions. A BERT layer has hidden size 512, with Hugging Face's own modules, and only its
attention swapped. Memory is the growth of a process's peak in one
pass, each in a process of its own, at torch's defaults and with its huge pages (THP_MEM_ALLOC_ENABLE=1), which the eager
pass gains most from. With `--device` it compares SDPA in bf16 on that device with the backends that run there,
at each length; a backend should reach 0.6 of the ratio that the density of its layout allows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from progress import progress
from results import Outcome, Sheet, Target
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.attention import Blocks, attend
from shoal.device import HOST, synchronize
from shoal.nn import set_linear_kernels

HEADS, DIM = 8, 64
HIDDEN = HEADS * DIM
WINDOW, GLOBAL = 3, 1
LONG, EAGER = 40_960, 4_096
MEBI = 1 << 20

Turn = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ways that take turns. The first is the peer; `least` are the ratios that are asked for."""

    title: str
    ways: Mapping[str, Turn]
    least: Mapping[str, float]


def window(blocks: int, *, size: int = WINDOW, edges: int = GLOBAL) -> Tensor:
    """Return the layout (1, blocks, blocks) of a sliding window and of `edges` first rows and columns."""
    at = torch.arange(blocks)
    layout = (at[:, None] - at).abs() <= size // 2
    layout[:edges], layout[:, :edges] = True, True
    return layout[None]


def operands(length: int) -> list[Tensor]:
    """Return query, key, value and the gradient of the output: (1, HEADS, length, DIM)."""
    generator = torch.Generator().manual_seed(length)
    tensors = [torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(4)]
    return [*(each.requires_grad_() for each in tensors[:3]), tensors[3]]


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention with whole score matrices, as models do without SDPA."""
    return (query @ key.transpose(-1, -2) / DIM**0.5).softmax(-1) @ value


def lengths(asked: list[int]) -> Iterator[Comparison]:
    """Compare with dense attention at each length."""
    must = {(4096, 64): 13, (8192, 64): 26, (16384, 64): 40, (4096, 16): 40}
    gathers = {4096: 6, 8192: 12}
    for length in asked:
        query, key, value, gradient = operands(length)

        def dense(query: Tensor = query, key: Tensor = key, value: Tensor = value, gradient: Tensor = gradient) -> None:
            _differentiate(F.scaled_dot_product_attention(query, key, value), (query, key, value), gradient)

        ways: dict[str, Turn] = {"SDPA": dense}
        least: dict[str, float] = {}
        for backend, block in (("native", 64), ("native", 16), ("gather", 64)):
            name = f"{backend}, blocks of {block}"
            ways[name] = _attention(backend, Blocks.of(window(length // block), block), query, key, value, gradient)
            asked_for = gathers.get(length) if backend == "gather" else must.get((length, block))
            if asked_for:
                least[name] = asked_for
        if length <= EAGER:
            dense_blocks = Blocks.dense(length, length, 64)
            ways["native, all blocks of 64"] = _attention("native", dense_blocks, query, key, value, gradient)
            least["native, all blocks of 64"] = 1.0
        yield Comparison(f"{length:,} tokens", ways, least)


def on_device(asked: list[int], device: torch.device) -> Iterator[Comparison]:
    """Compare with SDPA in bf16 on an accelerator; a turn ends when the device has done its work."""
    for length in asked:
        query, key, value, gradient = (each.detach().to(device, torch.bfloat16) for each in operands(length))
        leaves = [each.requires_grad_() for each in (query, key, value)]
        blocks = Blocks.of(window(length // 64), 64)

        def dense(leaves: list[Tensor] = leaves, gradient: Tensor = gradient) -> None:
            _differentiate(F.scaled_dot_product_attention(*leaves), leaves, gradient)

        ways = {"SDPA": dense, **{backend: _attention(backend, blocks, *leaves, gradient)
                                  for backend in ("triton", "flex", "gather")}}
        yield Comparison(f"{length:,} tokens on {device}", {name: _finished(turn, device) for name, turn in ways.items()},
                         {"triton": 0.6 / blocks.density} if length == max(asked) else {})


def _finished(turn: Turn, device: torch.device) -> Turn:
    def run() -> None:
        turn()
        synchronize(device)
    return run


def _attention(backend: str, blocks: Blocks, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> Turn:
    def turn() -> None:
        output = attend(query, key, value, blocks, backend=backend)  # pyright: ignore[reportArgumentType]  a name
        _differentiate(output, (query, key, value), gradient)
    return turn


def _differentiate(output: Tensor, leaves: Sequence[Tensor], gradient: Tensor) -> None:
    """Compute the gradients of `leaves`, and add them to none: within a model queries, keys and values are no leaves."""
    torch.autograd.grad(output, leaves, gradient)


def models(length: int) -> Iterator[Comparison]:
    """Compare with Hugging Face's sparse attention modules of the same structure, and within a BERT layer."""
    from transformers import BertConfig, BigBirdConfig, LongformerConfig
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    torch.manual_seed(0)
    hidden = torch.randn(1, length, HIDDEN)
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "intermediate_size": 4 * HIDDEN,
             "max_position_embeddings": length}

    bird = BigBirdBlockSparseAttention(
        BigBirdConfig(**sizes, attention_type="block_sparse", block_size=64, num_random_blocks=3))
    ones = torch.ones(1, length)
    band = torch.ones(1, 1, length // 64 - 4, 64, 3 * 64)
    masks = {"band_mask": band, "from_mask": ones[:, None, :, None], "to_mask": ones[:, None, None, :],
             "from_blocked_mask": ones.view(1, -1, 64), "to_blocked_mask": ones.view(1, -1, 64)}
    layout = window(length // 64, edges=1).clone()
    layout[:, -1], layout[:, :, -1] = True, True  # BigBird's last block is global, too
    for row in range(1, length // 64 - 1):
        layout[0, row, torch.randperm(length // 64, generator=torch.Generator().manual_seed(row))[:3]] = True
    yield Comparison(f"beside BigBird at {length:,}", {
        "Hugging Face's BigBird attention": _module(lambda: bird(hidden, **masks)[0], hidden),
        "native, its layout": _module(_projected(bird, hidden, Blocks.of(layout, 64)), hidden),
        "native, its layout, kernels.linear": _module(_projected(_with_linear_kernels(bird), hidden, Blocks.of(layout, 64)),
                                                      hidden)}, {"native, its layout": 4.0})
    alone, leaf = _without_projections(bird), hidden.clone().requires_grad_()
    yield Comparison(f"beside BigBird at {length:,}, without projections", {
        "Hugging Face's BigBird attention": _module(lambda: alone(leaf, **masks)[0], leaf),
        "native, its layout": _module(_projected(alone, leaf, Blocks.of(layout, 64)), leaf)}, {})

    long = LongformerSelfAttention(LongformerConfig(**sizes, attention_window=[512]), layer_id=0)
    none = torch.zeros(1, length)
    known = {"attention_mask": none, "is_index_masked": none.bool(), "is_index_global_attn": none.bool(),
             "is_global_attn": False}
    band_layout = window(length // 64, size=9, edges=0)  # 256 positions to either side, and the block itself
    yield Comparison(f"beside Longformer at {length:,}", {
        "Hugging Face's Longformer attention": _module(lambda: long(hidden, **known)[0], hidden),
        "native, its window": _module(_projected(long, hidden, Blocks.of(band_layout, 64)), hidden)},
        {"native, its window": 4.0})

    for dropout, least in ((0.0, 1.8), (0.1, 3.5)):
        layer = BertLayer(BertConfig(**sizes, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
                                     attn_implementation="sdpa"))
        blocks = Blocks.of(window(length // 64), 64)
        swapped = BertLayer(layer.attention.self.config)
        swapped.attention.self = _Swapped(layer.attention.self, blocks, dropout)  # pyright: ignore[reportAttributeAccessIssue]
        yield Comparison(f"a BERT layer at {length:,}, dropout {dropout:g}", {
            "SDPA": _module(lambda layer=layer: layer(hidden)[0], hidden),
            "attention swapped": _module(lambda layer=swapped: layer(hidden)[0], hidden)}, {"attention swapped": least})


class _Swapped(nn.Module):
    """BERT's self-attention with the sparse operation; projections as they are."""

    def __init__(self, of: nn.Module, blocks: Blocks, dropout: float) -> None:
        super().__init__()
        self.of, self.blocks, self.dropout = of, blocks, dropout

    def forward(self, hidden: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        return _projected(self.of, hidden, self.blocks, self.dropout)(), None


def _with_linear_kernels(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose linear layers compute as with `"kernels": {"linear": "auto"}`."""
    twin = deepcopy(module)
    set_linear_kernels(twin, "auto")
    return twin


def _without_projections(module: nn.Module) -> nn.Module:
    """Return a copy of an attention module whose queries, keys and values are the hidden states themselves."""
    twin = deepcopy(module)
    for name in ("query", "key", "value"):
        setattr(twin, name, nn.Identity())
    return twin


def _projected(module: nn.Module, hidden: Tensor, blocks: Blocks, dropout: float = 0.0) -> Callable[[], Tensor]:
    """Return attention over `blocks` with the projections of a Hugging Face attention module."""
    def run() -> Tensor:
        split = [projection(hidden).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
                 for projection in (module.query, module.key, module.value)]
        return attend(*split, blocks, dropout=dropout).transpose(1, 2).flatten(2)
    return run


def _module(forward: Callable[[], Tensor], hidden: Tensor) -> Turn:
    def turn() -> None:
        out = forward()
        out.reshape(hidden.shape).backward(hidden.detach())
    return turn


# --- Measuring ---

def _time(turn: Turn) -> float:
    began = time.perf_counter()
    turn()
    return time.perf_counter() - began


def compare(comparison: Comparison, rounds: int, tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Return the seconds of each way in each round; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in comparison.ways}
    for number in range(rounds + 1):
        tell(f"{comparison.title}: round {number} of {rounds}")
        for name, turn in comparison.ways.items():
            taken = _time(turn)
            if number:
                seconds[name].append(taken)
    return seconds


def _ratios(seconds: dict[str, list[float]], name: str) -> list[float]:
    first = next(iter(seconds))
    return [theirs / ours for theirs, ours in zip(seconds[first], seconds[name], strict=True)]


def child(kind: str, length: int) -> None:
    """Print the seconds of a warm pass, and by how many bytes the peak of this process grew."""
    query, key, value, gradient = operands(length)
    blocks = Blocks.of(window(length // 64), 64)
    before = _resident()

    def turn() -> None:
        for leaf in (query, key, value):
            leaf.grad = None
        output = eager(query, key, value) if kind == "eager" else attend(query, key, value, blocks)
        output.backward(gradient)
    turn()
    taken = min(_time(turn) for _ in range(2))
    print(taken, _peak() - before)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    """Return the largest resident memory so far. (getrusage also counts that of the process that started this one.)"""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _alone(kind: str, length: int, threads: int, huge_pages: bool) -> tuple[float, float]:
    """Return the seconds and bytes of a pass in a process of its own, whose torch may allocate huge pages."""
    command = [sys.executable, __file__, "--child", kind, "--lengths", str(length), "--threads", str(threads)]
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": str(int(huge_pages))}
    words = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()
    return float(words[0]), float(words[1])


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    if options.child:
        child(options.child, options.lengths[0])
        return
    rows: list[tuple[str, ...]] = []
    targets: list[Target] = []
    raw: dict[str, dict[str, list[float]]] = {}
    long, short = (4096, 1024) if options.quick else (LONG, EAGER)
    device = torch.device(options.device)
    compared = ((*lengths(options.lengths), *models(short)) if device == HOST else
                tuple(on_device(options.lengths, device)))
    with progress() as tell:
        for comparison in compared:
            seconds = raw[comparison.title] = compare(comparison, options.rounds, tell)
            for name in comparison.ways:
                ratios = _ratios(seconds, name)
                rows.append((comparison.title, name, f"{1e3 * statistics.median(seconds[name]):.1f}",
                             f"{statistics.median(ratios):.1f} x"))
                if name in comparison.least:
                    targets.append(Target.over(ratios, what=f"{comparison.title}: {name}, times faster",
                                               low=comparison.least[name]))
        if device != HOST:
            _publish(options, f"bf16 on {device}", rows, targets, raw)
            return
        tell("memory")
        for huge_pages in (False, True):
            setting = ", torch with huge pages" if huge_pages else ""
            sparse, dense = (_alone(kind, length, options.threads, huge_pages)
                             for kind, length in (("sparse", long), ("eager", short)))
            for name, (taken, grown) in ((f"sparse, {long:,} tokens", sparse), (f"eager dense, {short:,} tokens", dense)):
                rows.append((f"ten times the length{setting}", name, f"{1e3 * taken:.1f}", f"{grown / MEBI:.0f} MiB"))
            for what, index in (("time", 0), ("memory", 1)):
                targets.append(Target(what=f"{long:,} tokens beside eager dense at {short:,}{setting}: {what}",
                                      measured=sparse[index] / dense[index], high=0.25))
    _publish(options, f"fp32, {options.threads} thread(s)", rows, targets, raw)


def _publish(options: argparse.Namespace, how: str, rows: list[tuple[str, ...]], targets: list[Target],
             raw: dict[str, dict[str, list[float]]]) -> None:
    note = (f"Forward and backward, {how}, {HEADS} heads of {DIM}; a window of {WINDOW} blocks and {GLOBAL} global block "
            f"unless the row says otherwise. {options.rounds} rounds.")
    sheet = Sheet(title="Attention", columns=("comparison", "way", "median ms", "beside the first"), rows=tuple(rows))
    Outcome(benchmark="attention", command=" ".join(["python", *sys.argv]), note=note, raw=raw, sheets=(sheet,),
            targets=() if options.quick else tuple(targets)).publish(options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384], help="tokens (4096 8192 16384)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way that count (3)")
    parser.add_argument("--threads", type=int, default=1, help="threads (1)")
    parser.add_argument("--device", default="cpu", help="where to compute (cpu)")
    parser.add_argument("--quick", action="store_true", help="1,024 tokens and one round: that it runs, not how fast")
    parser.add_argument("--child", choices=("sparse", "eager"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="where the JSON goes (out/benchmarks/attention.json)")
    options = parser.parse_args()
    if options.quick:
        options.lengths, options.rounds = [1024], 1
    return options


if __name__ == "__main__":
    main()
