"""The training that benchmarks/faults.py disturbs: a small GPT on synthetic tokens, which resumes by itself.

    shoal run --ranks 2 --max-restarts 9 benchmarks/faulty.py --out FOLDER --steps 200 --stage 2 --every 10

Signals from outside ask a rank for the faults that a process can only commit itself: SIGUSR1 raises, SIGUSR2 hangs, and the
first real-time signals take memory beyond a limit, end the room for files, and spoil a gradient once.
At the end rank 0 writes the digest of the weights, which depends on every bit of them.
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal


class Tokens(torch.utils.data.Dataset[Tensor]):
    """Sequences of tokens by number."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 256, (33,), generator=torch.Generator().manual_seed(index))


class Model(nn.Module):
    """A decoder of `layers` blocks."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.1)
                                    for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def fail(number: int, frame: object) -> None:
    """Raise, as a bug in a script does."""
    raise RuntimeError("a fault that was asked for")


def hang(number: int, frame: object) -> None:
    """Wait for what never comes."""
    while True:
        time.sleep(1000)


def exhaust_memory(number: int, frame: object) -> None:
    """Allocate more than the process may have."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 24), resource.RLIM_INFINITY))
    torch.ones(1 << 28)


def end_file_space(number: int, frame: object) -> None:
    """Let every file end after 4 KiB, as on a full disk: the next copy or checkpoint of this process fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


class SpoiledOnce:
    """A hook of a gradient, which multiplies it by 1e12 after `spoil`, once: as a device that computes wrongly."""

    def __init__(self) -> None:
        self._asked = False

    def spoil(self, number: int, frame: object) -> None:
        self._asked = True

    def __call__(self, gradient: Tensor) -> Tensor:
        asked, self._asked = self._asked, False
        return gradient * 1e12 if asked else gradient


def main() -> None:
    """Train to the last step, from whatever is left of an earlier attempt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--stage", default="2", help="of ZeRO; with -offload the state is on the host")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--save", type=int, default=50)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
              "zero_optimization": {"stage": int(options.stage[0]), **(
                  {"offload_optimizer": {"device": "cpu"}} if options.stage.endswith("-offload") else {})},
              "checkpoint": {"keep_last": 2},
              "resilience": {"vault": {"every": options.every}, "guard": {"enabled": True}}}
    model = Model(options.width, options.layers)
    spoiled = SpoiledOnce()
    model.head.weight.register_hook(spoiled)
    engine, _, loader, _ = shoal.initialize(model=model, training_data=Tokens(), config=config)
    engine.load_checkpoint(options.out / "checkpoints")
    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGUSR2, hang)
    for number, handler in enumerate((exhaust_memory, end_file_space, spoiled.spoil)):
        signal.signal(signal.SIGRTMIN + number, handler)
    assert loader is not None
    for tokens in loader:
        if engine.global_steps >= options.steps:
            break
        engine.backward(engine(tokens))
        engine.step()
        time.sleep(options.pause)
        if engine.global_steps % options.save == 0:
            engine.save_checkpoint(options.out / "checkpoints")
    state = engine.consolidated_state_dict()
    if state is not None:
        digest = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in state.values()))
        (options.out / "digest").write_text(digest.hexdigest())
    engine.destroy()


if __name__ == "__main__":
    main()
