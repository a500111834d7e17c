"""The training that benchmarks/faults.py disturbs: a small GPT on synthetic tokens, which resumes by itself.

    shoal run --ranks 2 --max-restarts 9 benchmarks/faulty.py --out FOLDER --steps 200 --stage 2 --every 10

Signals from outside ask a rank for the faults that a process can only commit itself: SIGUSR1 raises, SIGUSR2 hangs, and the
first real-time signals take memory beyond a limit, end the room for files, spoil a gradient once, and hang in a loop that
uses the processor. Rank 0 notes the loss of each step in FOLDER/losses, and in FOLDER/loads from what each attempt goes on:
memory, disk, or nothing. At the end it writes the digest of the weights, which depends on every bit of them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

import shoal
from shoal.tensor_parallel import Column, Plan, Row, Whole, parallelize


class Tokens(torch.utils.data.Dataset[Tensor]):
    """Sequences of tokens by number, each of `length` and one more."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 256, (self._length + 1,), generator=torch.Generator().manual_seed(index))


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


class Published(nn.Module):
    """The model of examples/gpt of a preset, from tokens to the loss."""

    def __init__(self, preset: str) -> None:
        super().__init__()
        from workloads import workload  # a small model needs none of it, and starts again often

        self.model = workload(preset).build()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens[:, :-1], tokens[:, 1:].contiguous())


class Pairs(Tokens):
    """Sequences of tokens by number, and the tokens that follow: what a pipeline takes."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        tokens = super().__getitem__(index)
        return tokens[:-1], tokens[1:]


class Block(nn.Module):
    """A residual block of two linear layers, which tensor ranks slice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def next_token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def sliced_pipeline(width: int, layers: int) -> tuple[nn.Module, shoal.Mesh]:
    """Return a pipeline of two stages, each sliced over two tensor ranks, and its mesh."""
    mesh = shoal.Mesh(pipeline=2, tensor=2)
    model = shoal.PipelineModule([shoal.LayerSpec(nn.Embedding, 256, width),
                                  *(shoal.LayerSpec(Block, width) for _ in range(layers)),
                                  shoal.LayerSpec(nn.Linear, width, 256)], loss_fn=next_token_loss, num_stages=2)
    plan = Plan({"0": Whole(), "*.up": Column(), "*.down": Row(), str(layers + 1): Whole()})
    parallelize(model, mesh.group("tensor"), plan, stages=mesh.group("pipeline"))
    return model, mesh


def fail(number: int, frame: object) -> None:
    """Raise, as a bug in a script does."""
    raise RuntimeError("a fault that was asked for")


def hang(number: int, frame: object) -> None:
    """Wait for what never comes."""
    while True:
        time.sleep(1000)


def spin(number: int, frame: object) -> None:
    """Use the processor for what never ends."""
    while True:
        pass


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
    parser.add_argument("--stage", default="2", help="of ZeRO; with -offload the state is on the host, with -mesh the ranks "
                                                     "are 2 pipeline stages x 2 tensor ranks x data ranks")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--save", type=int, default=50)
    parser.add_argument("--model", default="small", help="small, or a preset of examples/gpt; its batch is twice as large")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0)
    options = parser.parse_args()
    torch.manual_seed(0)
    small = options.model == "small"
    config = {"train_batch_size": 4 if small else 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
              "zero_optimization": {"stage": int(options.stage[0]), **(
                  {"offload_optimizer": {"device": "cpu"}} if options.stage.endswith("-offload") else {})},
              "checkpoint": {"keep_last": 2},
              "resilience": {"vault": {"every": options.every}, "guard": {"enabled": True}}}
    in_mesh = options.stage.endswith("-mesh")
    mesh: shoal.Mesh | None = None
    if in_mesh:
        model, mesh = sliced_pipeline(options.width, options.layers)
    else:
        model = Model(options.width, options.layers) if small else Published(options.model)
    spoiled = SpoiledOnce()
    list(model.parameters())[-1].register_hook(spoiled)
    engine, _, loader, _ = shoal.initialize(model=model, config=config, mpu=mesh,
                                            training_data=Pairs(32) if in_mesh else Tokens(32 if small else 128))
    loaded, _ = engine.load_checkpoint(options.out / "checkpoints")
    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGUSR2, hang)
    for number, handler in enumerate((exhaust_memory, end_file_space, spoiled.spoil, spin)):
        signal.signal(signal.SIGRTMIN + number, handler)
    assert loader is not None
    batches = iter(loader)
    notes = os.open(options.out / "losses", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    if engine.global_rank == 0:
        source = "nothing" if loaded is None else "disk" if str(loaded).startswith(str(options.out)) else "memory"
        with (options.out / "loads").open("a") as file:
            file.write(f"{time.monotonic()} {engine.global_steps} {source}\n")
    while engine.global_steps < options.steps:
        if isinstance(engine, shoal.PipelineEngine):
            loss = engine.train_batch()
        else:
            loss = engine(next(batches))
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            with suppress(OSError):  # the fault that ends the room for files ends it for this one too
                os.write(notes, f"{time.monotonic()} {engine.global_steps} {float(loss)}\n".encode())
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
