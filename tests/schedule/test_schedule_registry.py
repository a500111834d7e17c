"""A schedule is selected by name (built-in, torch's, or registered), and its parameters can be command-line flags."""

import argparse
import inspect
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

import shoal
from shoal.errors import ConfigError, UsageError
from shoal.schedule import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    make_schedule,
    register_schedule,
)
from shoal.schedule.registry import get_config_from_args


def sgd() -> SGD:
    return SGD([torch.zeros(1)], lr=0.5)


def test_a_name_selects_its_class() -> None:
    assert type(make_schedule("WarmupLR", None, sgd())) is WarmupLR
    assert type(make_schedule("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 2}, sgd())) is WarmupDecayLR


def test_torch_schedulers_are_available_by_name() -> None:
    assert type(make_schedule("CosineAnnealingLR", {"T_max": 5}, sgd())) is CosineAnnealingLR


def test_users_can_register_a_name() -> None:
    @register_schedule("Brief")
    class Brief(WarmupLR):
        pass

    assert isinstance(make_schedule("Brief", {"warmup_num_steps": 2}, sgd()), Brief)
    with pytest.raises(UsageError, match="scheduler: the name 'WarmupLR' is taken by"):
        register_schedule("WarmupLR")(Brief)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.type: got 'WarmupLinearLR'; did you mean 'Warmup.*LR'\?"):
        make_schedule("WarmupLinearLR", {}, sgd())


def test_a_missing_keyword_is_named() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps: missing; WarmupDecayLR needs it"):
        make_schedule("WarmupDecayLR", {}, sgd())


def test_an_unknown_keyword_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"params\.warmup_steps: WarmupLR has no such keyword; did you mean 'warmup_num"):
        make_schedule("WarmupLR", {"warmup_steps": 3}, sgd())


def test_a_value_that_torch_rejects_names_the_schedule() -> None:
    with pytest.raises(ConfigError, match=r"scheduler: CyclicLR with .*mode='x': mode is invalid"):
        make_schedule("CyclicLR", {"base_lr": 0.1, "max_lr": 1, "mode": "x"}, sgd())


def test_an_object_that_is_not_an_optimizer_is_rejected() -> None:
    with pytest.raises(UsageError, match="got str as the optimizer"):
        make_schedule("WarmupLR", {}, "adam")  # pyright: ignore


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
