"""The guard refuses a step whose loss or gradient norm is an outlier, and finds out whether hardware or data is at fault.

    1.  The step is refused before it changes a weight. What was measured is noted, and every rank raises `GuardRewind`: the
        job restarts from its last copy, and comes to the same step with the same samples.
    2a. The step is in order this time: hardware. The log names the ranks that measured something else before.
    2b. It is an outlier again, with another result of the job or of a rank: hardware too. The step is replayed once more.
    2c. It is the same outlier: data. Its samples are noted, and the job restarts without them.

An outlier is a value that is not finite, or that lies above the median of the last steps by many times their median absolute
deviation (MAD). What must outlive the ranks is in a file beside the copies.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import inf, isclose, isfinite
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from shoal.errors import GuardError, GuardRewind
from shoal.log import logger
from shoal.resilience.settings import GuardSettings
from shoal.transport.collectives import Communicator

__all__ = ["Guard", "History", "Samples"]

FLOOR = 0.01
"""The least deviation, as a share of the median: values that hardly vary have a MAD of almost 0."""
LEAST = 8
"""Steps that the history must have before a finite value can be an outlier."""
SAME = 1e-3
"""Relative difference up to which two measurements of one rank count as the same: kernels that add in any order differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples of one epoch, by their index in the dataset; they are skipped in this epoch and in later ones."""

    epoch: int
    ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Measurements of all ranks at one step."""

    step: int
    loss: float | None
    """The mean over microbatches and data ranks; None where the engine did not see it."""
    norm: float
    losses: list[float]
    """By rank: the sum over its microbatches."""
    gradients: list[float]
    """By rank: the norms of its own addends, before they met those of others."""


@dataclass(slots=True, kw_only=True)
class _Record:
    """The state of the guard that outlives the ranks."""

    number: int = 0
    """How often the record was written."""
    suspect: _Measured | None = None
    """The step that is to be replayed."""
    skips: int = 0
    """How often samples were skipped since the last `window` steps that were all accepted."""
    skipped: list[Samples] = field(default_factory=list[Samples])


class History:
    """The values of the last accepted steps."""

    def __init__(self, window: int, deviations: float) -> None:
        self.values: deque[float] = deque(maxlen=window)
        self._deviations = deviations

    @property
    def limit(self) -> float | None:
        """The value above which one is an outlier; None while there are too few."""
        if len(self.values) < LEAST:
            return None
        middle = median(self.values)
        deviation = max(median(abs(value - middle) for value in self.values), FLOOR * abs(middle))
        return middle + self._deviations * deviation

    def objection(self, name: str, value: float) -> str | None:
        """Return why `value` is an outlier, None if it is none."""
        if not isfinite(value):
            return f"the {name} is {value}"
        limit = self.limit
        if limit is None or value <= limit:
            return None
        return (f"the {name} is {value:.4g}, above {limit:.4g}; the median of the last {len(self.values)} steps is "
                f"{median(self.values):.4g}")


class Guard:
    """The guard of one engine."""

    def __init__(self, path: Path, settings: GuardSettings, ranks: Communicator) -> None:
        """Keep the record in the file `path` on each node of `ranks`, all ranks of the job. A collective call.

        The record of a node that has joined since is older, or is not there: the newest of all is taken.
        """
        self._path = path
        self._settings = settings
        self._ranks = ranks
        self._record = max(ranks.gather_objects(_read(path)), key=lambda record: record.number)
        self._losses: list[Tensor] = []
        self._accepted = 0
        self._raised: tuple[type[GuardError], str] | None = None
        """The kind and the message of the error after which this process takes no step."""
        self._has_raised_again = False
        self._history = {name: History(settings.window, settings.deviations) for name in ("loss", "gradient norm")}

    @property
    def skipped(self) -> list[Samples]:
        """The samples that are to be skipped."""
        return self._record.skipped

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of a microbatch of the next step."""
        self._losses.append(loss.detach())

    def forget(self) -> None:
        """Forget the losses of a step that is not taken."""
        self._losses.clear()

    def judge(self, step: int, norm: float, gradient: Tensor, samples: Callable[[], Iterable[Samples]], *,
              overflow: bool = False) -> None:
        """Accept step `step`, or raise on every rank; a collective call, before the step changes anything.

        `norm` is that of the gradients of all ranks, `gradient` this rank's own, a number; `samples` returns those of the
        step. An `overflow` is left to the loss scale, and enters no history: it only proves that a replay gave another
        result. Raises `GuardRewind` to restart from the last copy, `GuardError` where the samples cannot be skipped. A
        script that catches either gets it again at each step, until it loads a checkpoint: a further step is no replay.
        """
        if self._raised is not None:
            self._raise_again(*self._raised)
        try:
            self._judge(step, norm, gradient, samples, overflow=overflow)
        except GuardError as error:  # on every rank
            self._raised = type(error), str(error)
            raise

    def _judge(self, step: int, norm: float, gradient: Tensor, samples: Callable[[], Iterable[Samples]], *,
               overflow: bool) -> None:
        suspect = self._record.suspect
        replayed = suspect is not None and suspect.step == step
        if overflow and not replayed:
            return
        measured = self._measure(step, norm, gradient)
        objection = None if overflow else self._objection(measured)
        if suspect is not None and replayed:
            drawn = list(samples())
            culprit = _culprit(suspect, measured)
            if not drawn:
                culprit += " (unless the script gave the step other samples than before: the engine does not draw them)"
            if objection is None:
                self._report_hardware(suspect, measured, culprit, "Training goes on")
                self._record.suspect = None
                self._write()
            elif not _is_same_result(suspect, measured):
                self._replay_again(suspect, measured, objection, culprit)
            else:
                self._skip(step, objection, drawn)
        elif objection is not None:
            self._record.suspect = measured
            self._rewind(f"step {step}: {objection}. The step is not taken: it is replayed from the last copy, to tell "
                         f"hardware from data")
        if not overflow:
            self._accept(measured)

    def state_dict(self) -> dict[str, Any]:
        """Return the history, for a checkpoint."""
        return {name: list(history.values) for name, history in self._history.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, with a checkpoint: the next step goes on from there."""
        self._raised = None
        for name, history in self._history.items():
            history.values.clear()
            history.values.extend(cast("list[float]", state.get(name, [])))

    def _raise_again(self, kind: type[GuardError], error: str) -> NoReturn:
        """Raise an error that the script has caught, and log that it did, because it may catch this one too."""
        name = kind.__name__
        text = (f"the script caught the {name} of an earlier step and goes on, so no step is taken and nothing is replayed. "
                f"Let it end the process, so that the job restarts from its last copy: where the script catches all "
                f"exceptions, add `except shoal.errors.GuardError: raise` before. The {name} was: {error}")
        if not self._has_raised_again and self._ranks.rank == 0:
            logger.error("resilience.guard: %s", text)
        self._has_raised_again = True
        self._losses.clear()
        raise kind(text)

    def _measure(self, step: int, norm: float, gradient: Tensor) -> _Measured:
        total = float(torch.stack([loss.double().reshape(()).cpu() for loss in self._losses]).sum()) if self._losses else 0.0
        own = torch.tensor([total, len(self._losses), gradient.item(), norm], dtype=torch.float64, device="cpu")
        self._losses.clear()
        words = own.view(torch.int64).to(self._ranks.words_device)
        rows = self._ranks.gather_words(words, "the loss and the norm of a step").cpu().view(torch.float64).tolist()
        count = sum(row[1] for row in rows)
        norms = [row[3] for row in rows]  # the same, unless a rank is at fault: all of them judge the worst
        return _Measured(step=step, loss=sum(row[0] for row in rows) / count if count else None,
                         norm=next((each for each in norms if not isfinite(each)), max(norms)),
                         losses=[row[0] for row in rows], gradients=[row[2] for row in rows])

    def _objection(self, measured: _Measured) -> str | None:
        values = {"loss": measured.loss, "gradient norm": measured.norm}
        found = (history.objection(name, value) for name, history in self._history.items()
                 if (value := values[name]) is not None)
        return next((text for text in found if text is not None), None)

    def _accept(self, measured: _Measured) -> None:
        if measured.loss is not None:
            self._history["loss"].values.append(measured.loss)
        self._history["gradient norm"].values.append(measured.norm)
        self._accepted += 1
        if self._record.skips and self._accepted >= self._settings.window:
            self._record.skips = 0
            self._write()

    def _report_hardware(self, before: _Measured, now: _Measured, culprit: str, follows: str) -> None:
        """Log which ranks measured something else when the step was replayed, and what `follows`."""
        if self._ranks.rank == 0:
            logger.error("resilience.guard: step %d gave a loss of %s and a gradient norm of %.4g, and %s and %.4g when it "
                         "was replayed. This is a fault of hardware: %s. %s", now.step, _shown(before.loss), before.norm,
                         _shown(now.loss), now.norm, culprit, follows)

    def _replay_again(self, before: _Measured, now: _Measured, objection: str, culprit: str) -> None:
        """Restart for another replay of a step whose result is another outlier each time; every rank raises."""
        again = f"step {now.step}: {objection}, and its replay gave another result: {culprit}"
        if self._record.skips >= self._settings.max_skips:
            raise GuardError(f"{again}. Steps were skipped or replayed {self._record.skips} times already within "
                             f"{self._settings.window} steps (resilience.guard.max_skips), so this is not repeated: take "
                             f"the device out of the job")
        self._report_hardware(before, now, culprit, "The step is replayed once more")
        self._record.suspect = now
        self._record.skips += 1
        self._rewind(f"{again}. The step is replayed once more from the last copy")

    def _skip(self, step: int, objection: str, samples: list[Samples]) -> None:
        """Have the next attempt skip the samples of a step; every rank raises."""
        known = self._ranks.gather_objects(samples)[0]
        again = f"step {step}: {objection}, as before it was replayed: the data is at fault, or the training diverges"
        if not known:
            raise GuardError(f"{again}. Its samples cannot be skipped, for the engine does not draw them: give "
                             f"training_data to initialize, or examine the data of that step yourself")
        shown = "; ".join(f"epoch {each.epoch}: {', '.join(map(str, each.ids))}" for each in known)
        if self._record.skips >= self._settings.max_skips:
            raise GuardError(f"{again}. Steps were skipped or replayed {self._record.skips} times already within "
                             f"{self._settings.window} steps (resilience.guard.max_skips), so this is not repeated: lower "
                             f"the learning rate, or examine the samples of this step ({shown})")
        if self._ranks.rank == 0:
            logger.error("resilience.guard: %s. Its samples are skipped from now on: %s", again, shown)
        self._record.suspect = None
        self._record.skips += 1
        self._record.skipped.extend(known)
        self._rewind(f"{again}. Training goes on from the last copy, without the samples of this step ({shown})")

    def _rewind(self, text: str) -> None:
        self._write()
        raise GuardRewind(f"{text}. Where shoal run may not restart, it ends here: give --max-restarts")

    def _write(self) -> None:
        """Write the record, or log why that failed. A collective call: no rank goes on, or ends, before it is there."""
        error = ""
        self._record.number += 1
        draft = self._path.with_suffix(f".part{self._ranks.rank}")  # ranks of one node write the same file
        try:
            draft.write_text(json.dumps(asdict(self._record)))
            os.replace(draft, self._path)
        except OSError as failure:
            error = str(failure)
        if error := next(filter(None, self._ranks.gather_objects(error)), ""):
            logger.error("resilience.guard: its record cannot be written, and another attempt will not know of this step: "
                         "%s. Free memory in %s", error, self._path.parent)


def _read(path: Path) -> _Record:
    if not path.exists():
        return _Record()
    values = json.loads(path.read_text())
    suspect = values["suspect"]
    return _Record(number=values["number"], suspect=None if suspect is None else _Measured(**suspect), skips=values["skips"],
                   skipped=[Samples(**each) for each in values["skipped"]])


def _differing(before: _Measured, now: _Measured) -> list[int] | None:
    """Return the ranks whose own loss or gradients are others than before; None for another number of ranks."""
    if len(before.losses) != len(now.losses):
        return None
    return [rank for rank in range(len(now.losses)) if not (_same(before.losses[rank], now.losses[rank])
                                                            and _same(before.gradients[rank], now.gradients[rank]))]


def _is_same_result(before: _Measured, now: _Measured) -> bool:
    """Whether two results of one step are one: of the job, and of each rank where the ranks are as many as before."""
    losses = (inf if before.loss is None else before.loss, inf if now.loss is None else now.loss)
    return _same(before.norm, now.norm) and _same(*losses) and not _differing(before, now)


def _culprit(before: _Measured, now: _Measured) -> str:
    """Return which hardware to examine after two results of one step."""
    differing = _differing(before, now)
    if differing is None:
        return "the job has another number of ranks now, so none can be named"
    if not differing:
        return "the ranks' own losses and gradients were the same, so it was in their sum: memory or the network"
    if len(differing) == len(now.losses) > 1:
        return "every rank's result differed: memory of weights that all use, or the network"
    return f"rank {', '.join(map(str, differing))} had another result: examine that device and its memory"


def _same(before: float, now: float) -> bool:
    """Whether two results are one: up to the order of sums, and values that are not finite among themselves."""
    if not (isfinite(before) and isfinite(now)):
        return isfinite(before) == isfinite(now)
    return isclose(before, now, rel_tol=SAME)


def _shown(loss: float | None) -> str:
    return "unknown size" if loss is None else f"{loss:.4g}"
