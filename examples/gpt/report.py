"""The report of rank 0 before and after training: model, quality, files, and the command that resumes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

import shoal
import tables
from corpus import Blocks, Corpus
from curve import History, Mark, picture, text_picture
from display import clock
from evaluate import bits_per_byte, generate
from shoal.zero.placement import StateBytes, state_bytes

PROMPT = b"\0class "
"""The prompt of the sample: the start of a file, and a word."""

SAMPLE = 400
"""Bytes that the model writes at the end."""


class Report:
    """Speaks on `console`, which is quiet on every rank but 0; all ranks call it, for measuring takes all of them."""

    def __init__(self, engine: shoal.Engine, corpus: Corpus, args: argparse.Namespace, parser: argparse.ArgumentParser,
                 console: Console) -> None:
        self.engine = engine
        self.corpus = corpus
        self.args = args
        self.parser = parser
        self.console = console
        self.began = time.perf_counter()
        ranks = "1 rank" if engine.world_size == 1 else f"{engine.world_size} ranks"
        self.title = f"GPT {args.model}, ZeRO stage {engine.zero_optimization_stage()}, {ranks}"

    def begin(self) -> None:
        """Say what is about to be trained."""
        parameters = sum(parameter.numel() for parameter in self.engine.module.parameters())
        train, validation = self.corpus.train, self.corpus.validation
        self._say(f"[bold]{self.title}[/]: {parameters / 1e6:.1f} M parameters, "
                  f"{self.engine.train_batch_size()} x {self.args.block} bytes a step")
        self._say(f"{train.length / 1e6:.1f} MB of Python in {train.documents} files to learn from, "
                  f"{validation.length / 1e6:.2f} MB in {validation.documents} files held out")
        if self.engine.global_steps:
            self._say(f"going on after step {self.engine.global_steps}")

    def stopped(self) -> None:
        """Say where a run that was interrupted can be taken up again."""
        self._say(f"stopped after step {self.engine.global_steps}, which is saved")
        tables.show(self.console, places=self._places(steps=self.args.steps))

    def finished(self, history: History) -> None:
        """Measure what was learned; say so, draw the curve, and tell how to go on."""
        self._say(f"trained to step {self.engine.global_steps} in {clock(time.perf_counter() - self.began)}; "
                  f"now for the held-out files")
        engine, held_out = self.engine, self.corpus.validation
        engine.eval()
        overlapping = Blocks(held_out.path, self.args.block, stride=self.args.block // 2)
        bits = bits_per_byte(engine, overlapping, engine.device)
        written = bytes(generate(engine, PROMPT, SAMPLE, window=self.args.block, device=engine.device))
        formula, measured = self._state()
        model = Mark(name=f"GPT {self.args.model}", bits=bits)
        marks = [Mark(name="order-0 entropy", bits=held_out.order0), Mark(name="xz -9", bits=held_out.xz)]
        if engine.global_rank == 0:
            quality = {"step": engine.global_steps, "bits_per_byte": bits}
            (self.args.out / "quality.json").write_text(json.dumps(quality) + "\n")
            picture(self.args.out / "loss.png", history.bits, model, marks, self.title)
        tables.show(self.console, tables.sample(PROMPT, written), text_picture(history.bits, marks),
                    tables.quality(model, marks, f"{held_out.length:,} held-out bytes"),
                    tables.state(formula, measured, f"Model state of a rank: {self.title}"),
                    places={"The loss curve": str(self.args.out / "loss.png")} | self._places(2 * engine.global_steps))

    def _say(self, words: str) -> None:
        self.console.print(words, highlight=False, soft_wrap=True)

    def _state(self) -> tuple[StateBytes, StateBytes]:
        """Return the model state of a rank as the formula has it, and as measured on the rank that holds the most."""
        parameters = list(self.engine.module.parameters())
        formula = state_bytes(self.engine.zero_optimization_stage(), sum(parameter.numel() for parameter in parameters),
                              self.engine.world_size, compute=parameters[0].dtype)
        measured = [formula] * self.engine.world_size
        dist.all_gather_object(measured, self.engine.model_state_bytes())
        return formula, max(measured, key=lambda state: state.total)

    def _places(self, steps: int | None) -> dict[str, str]:
        return {"The checkpoint": str(self.args.out / "checkpoints"), "To train on": self._command(steps)}

    def _command(self, steps: int | None) -> str:
        """Return the command line that takes this run from its last checkpoint to step `steps`."""
        shoal = "shoal" if shutil.which("shoal") else os.path.relpath(Path(sys.executable).with_name("shoal"))
        words = [shoal, "run", "--ranks", self.engine.world_size, sys.argv[0], "--resume"]
        given = vars(self.args) | {"steps": steps, "resume": False}
        for name, value in given.items():
            if value != self.parser.get_default(name) and not isinstance(value, bool):
                words += [f"--{name.replace('_', '-')}", value]
        return shlex.join(map(str, words))
