"""Rank 0's report before and after training: the schedule's grid, the losses, and the state on every rank."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from corpus import Blocks, Split
from curve import History, Mark, picture, text_picture
from display import size
from shoal.engine.pipeline_engine import PipelineEngine
from shoal.pipeline.check import simulate
from shoal.pipeline.schedules import make_schedule
from shoal.pipeline.text_grid import painted

HELD_OUT = 16
"""Microbatches of held-out text for the evaluation at the end."""


class Summary:
    """Prints on `console`, which is quiet on all ranks but 0. All ranks call it, because it uses collectives."""

    def __init__(self, engine: PipelineEngine, held_out: Split, block: int, console: Console) -> None:
        self.engine = engine
        self.held_out = held_out
        self.block = block
        self.console = console
        self.title = ""

    def begin(self, model: str) -> None:
        """Print the model and the mesh, and draw the schedule's grid."""
        engine = self.engine
        mesh = " x ".join(f"{engine.mesh.size(axis)} {axis}" for axis in ("pipeline", "data", "tensor"))
        self.title = f"GPT {model}, {mesh} ranks, ZeRO stage {engine.zero_optimization_stage()}"
        self._print(f"[bold]{self.title}[/]: {engine.train_batch_size()} x {self.block} bytes a step, in "
                  f"{engine.micro_batches} microbatches")
        if engine.num_stages > 1:
            schedule = make_schedule(engine.settings.pipeline.schedule or engine.module.schedule, ranks=engine.num_stages,
                                     microbatches=engine.micro_batches, stages_per_rank=engine.module.stages_per_rank)
            simulation = simulate(schedule)
            self._print(f"schedule {schedule.name}, bubble {simulation.bubble:.1%}:")
            self.console.print(painted(simulation, width=min(self.console.width, 100)))
        if engine.global_steps:
            self._print(f"going on after step {engine.global_steps}")

    def finished(self, history: History, out: Path) -> None:
        """Evaluate on held-out text, and print the result of the training and the state on every rank."""
        bits = self.evaluate()
        marks = [Mark(name="order-0 entropy", bits=self.held_out.order0), Mark(name="xz -9", bits=self.held_out.xz)]
        table = self._table()
        if self.engine.global_rank == 0:
            picture(out / "loss.png", history.bits, Mark(name="held out", bits=bits), marks, self.title)
        self.console.print()
        self.console.print(text_picture(history.bits, marks))
        self.console.print()
        self._print(f"step {self.engine.global_steps}: {bits:.3f} bits per byte of held-out text")
        self.console.print()
        self.console.print(table)
        self._print(f"The loss curve: {out / 'loss.png'}; the checkpoint, for any mesh and for examples/gpt: "
                  f"{out / 'checkpoints'}")

    def evaluate(self) -> float:
        """Return the bits per byte on held-out text, sampled evenly over the files."""
        engine = self.engine
        blocks = Blocks(self.held_out.path, self.block)
        ranks, rank = engine.mesh.size("data"), engine.mesh.rank("data")
        indices = torch.linspace(0, len(blocks) - 1, HELD_OUT * ranks).long()[rank::ranks].tolist()
        pairs = ((x[None], y[None]) for x, y in (blocks[index] for index in indices))
        loss: torch.Tensor = engine.eval_batch(islice(pairs, HELD_OUT), num_micro_batches=HELD_OUT)
        return loss.item() / math.log(2)

    def _table(self) -> Table:
        """Return a table of every rank's coordinates and state."""
        engine, mesh = self.engine, self.engine.mesh
        state = engine.model_state_bytes()
        held = [layer.name for stage in engine.module.stages for layer in stage.layers]
        row = (*(str(mesh.rank(axis)) for axis in ("pipeline", "data", "tensor")), size(state.weight), size(state.gradient),
                size(state.master + state.moments), size(state.total), ", ".join(held).replace("blocks.", "block "))
        rows = [row] * dist.get_world_size()
        dist.all_gather_object(rows, row)
        table = Table(title="State on each rank", title_justify="left", box=None, header_style="dim", padding=(0, 2, 0, 0))
        for name in ("rank", "pipe", "data", "tensor", "weight", "grad", "optim", "total", "layers"):
            table.add_column(name, justify="left" if name == "layers" else "right")
        for rank, row in enumerate(rows):
            table.add_row(str(rank), *row)
        return table

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)
