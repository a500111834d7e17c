"""Every parameter of a built-in schedule has a command-line flag, and the flags give the configuration section."""

import argparse
import inspect
from typing import Any

import pytest
import torch
from torch.optim import SGD

import shoal
from shoal.schedule import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR, make_schedule
from shoal.schedule.registry import get_config_from_args


def section_from(*words: str) -> tuple[dict[str, Any] | None, str | None]:
    parser = shoal.add_tuning_arguments(argparse.ArgumentParser())
    return get_config_from_args(parser.parse_args(words))


@pytest.mark.parametrize("kind", [LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_every_parameter_has_a_flag_that_reaches_it(kind: Any) -> None:
    names = [name for name in inspect.signature(kind.__init__).parameters
             if name not in ("self", "optimizer", "last_batch_iteration")]
    words = [word for name in names for word in (f"--{name}", "7")]
    section = {"type": kind.__name__, "params": dict.fromkeys(names, 7)}
    assert section_from("--lr_schedule", kind.__name__, *words) == (section, None)


def test_flags_are_read_as_json_would_be() -> None:
    section, _ = section_from("--lr_schedule", "OneCycle", "--cycle_min_lr", "1e-3", "--cycle_max_lr", "[0.1,0.2]",
                              "--cycle_momentum", "False", "--cycle_first_step_size", "10", "--warmup_type", "linear")
    assert section == {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": [0.1, 0.2],
                                                      "cycle_first_step_size": 10, "cycle_momentum": False}}


def test_the_section_builds_the_schedule() -> None:
    section, _ = section_from("--lr_schedule", "WarmupLR", "--warmup_max_lr", "0.5", "--warmup_type", "linear")
    assert section is not None
    schedule = make_schedule(section["type"], section["params"], SGD([torch.zeros(1)], lr=1))
    assert isinstance(schedule, WarmupLR)


def test_a_missing_flag_is_named() -> None:
    assert section_from() == (None, "--lr_schedule is not given; choose one of LRRangeTest, OneCycle, WarmupLR, "
                                    "WarmupDecayLR, WarmupCosineLR")
    assert section_from("--lr_schedule", "OneCycle", "--cycle_min_lr", "0.1") == (
        None, "--cycle_max_lr is not given; OneCycle needs it")
