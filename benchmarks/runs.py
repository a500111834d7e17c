"""One run of examples/gpt/train.py under `shoal run`, or of ddp_train.py, in a folder named after what decides its outcome.

A run is done when it has measured what it learned. One that was interrupted goes on from its last checkpoint; one whose
configuration has changed since is another run.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from machine import ROOT
from training_quality import Learned

SCRIPT = ROOT / "examples" / "gpt" / "train.py"
DDP = ROOT / "benchmarks" / "ddp_train.py"
SAVES = 10  # checkpoints of a run
LAST_WORDS = 5  # lines


class RunFailed(RuntimeError):
    """A run ended badly; the message says where its words are, and the last of them."""


@dataclass(slots=True, kw_only=True)
class Run:
    """A training run of a configuration and a seed; `folder` is that of all runs."""

    config: Path
    seed: int
    steps: int
    model: str
    ranks: int
    folder: Path
    hook: str = ""
    """Of DDP, which then trains in place of Shoal: a name of `ddp_hooks.BY_NAME`."""
    _process: subprocess.Popen[str] | None = field(default=None, init=False)
    _ended: bool = field(default=False, init=False)

    @property
    def name(self) -> str:
        return f"{self.config.stem}{f', DDP {self.hook}' if self.hook else ''}, seed {self.seed}"

    @property
    def out(self) -> Path:
        """Where the run keeps what it makes."""
        digest = hashlib.sha256(self.config.read_bytes()).hexdigest()[:8]
        who = f"{self.config.stem}-{digest}{f'-ddp-{self.hook}' if self.hook else ''}"
        return self.folder / f"{who}-{self.model}-{self.ranks}x{self.steps}-seed{self.seed}"

    @property
    def done(self) -> bool:
        """Whether it has taken all steps and measured what it learned."""
        try:
            return json.loads((self.out / "quality.json").read_text())["step"] == self.steps
        except (FileNotFoundError, json.JSONDecodeError):
            return False

    @property
    def command(self) -> list[str]:
        """The command line that begins it, or goes on from its last checkpoint."""
        save_every = max(1, self.steps // SAVES)
        if self.hook:
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks),
                    str(DDP), "--hook", self.hook, "--shoal-config", str(self.config), "--model", self.model,
                    "--seed", str(self.seed), "--steps", str(self.steps), "--out", str(self.out),
                    "--cache", str(self.folder / "corpus")]
        words = [sys.executable, "-m", "shoal", "run", "--ranks", str(self.ranks), str(SCRIPT),
                 "--shoal-config", str(self.config), "--model", self.model, "--seed", str(self.seed),
                 "--steps", str(self.steps), "--save-every", str(save_every), "--out", str(self.out),
                 "--cache", str(self.folder / "corpus")]
        return [*words, "--resume"] if (self.out / "checkpoints" / "latest").exists() else words

    def train(self, tell: Callable[[str], None]) -> None:
        """Train to the end; `tell` receives what it says of its steps. Raises `RunFailed`."""
        if self._ended:
            raise RunFailed(f"{self.name}: ended before it began")
        self.out.mkdir(parents=True, exist_ok=True)
        log, said = self.out / "train.log", list[str]()
        with log.open("a") as file, subprocess.Popen(self.command, text=True, stdin=subprocess.DEVNULL,
                                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as self._process:
            assert self._process.stdout
            for line in self._process.stdout:
                file.write(line)
                file.flush()
                said = [*said[1 - LAST_WORDS:], line.strip()]
                if line.startswith("step "):
                    tell(line.partition("  grad")[0].strip())
        status = self._process.returncode
        if status or not self.done:
            raise RunFailed(f"{self.name}: ended with status {status}; {log} ends: {' / '.join(filter(None, said))}")

    def end(self) -> None:
        """Let it save a checkpoint and end, or never begin."""
        self._ended = True
        if self._process and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def learned(self) -> Learned:
        """Return what a run that is done has learned."""
        return Learned.load(self.out)
