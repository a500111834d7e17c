"""A schedule is selected by name: built-in, torch's, or registered by a user."""

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from shoal.errors import ConfigError, UsageError
from shoal.schedule import WarmupDecayLR, WarmupLR, make_schedule, register_schedule


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
