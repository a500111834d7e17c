"""Optimizers by name: classes, defaults, and one test per message."""

from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from shoal.errors import ConfigError, NotSupportedYet, OptimizerError, UsageError
from shoal.optim import Lion, make_optimizer, register_optimizer


def weights() -> list[torch.Tensor]:
    return [torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)]


@pytest.mark.parametrize(("name", "params", "expected"), [
    ("Adam", {}, AdamW), ("adam", {"adam_w_mode": False}, Adam), ("ADAMW", {"adam_w_mode": False}, AdamW),
    ("adam", {"torch_adam": True}, AdamW), ("sgd", {"lr": 0.1}, SGD), ("SGD", {}, SGD), ("adagrad", {}, Adagrad),
    ("LION", {}, Lion), ("RMSprop", {"alpha": 0.9}, RMSprop),
])  # fmt: skip
def test_a_name_builds_its_class(name: str, params: dict[str, Any], expected: type[Optimizer]) -> None:
    assert type(make_optimizer(name, params, weights())) is expected


def test_adam_is_fused_and_has_the_published_defaults() -> None:
    defaults = make_optimizer("adam", None, weights()).defaults
    assert (defaults["lr"], defaults["betas"], defaults["weight_decay"]) == (1e-3, (0.9, 0.999), 0)
    assert defaults["fused"] is True


def test_torch_adam_keeps_torchs_default_decay() -> None:
    assert make_optimizer("adamw", {"torch_adam": True}, weights()).defaults["weight_decay"] == 0.01


def test_lists_from_json_become_betas() -> None:
    assert make_optimizer("lion", {"betas": [0.9, 0.99]}, weights()).defaults["betas"] == (0.9, 0.99)


def test_groups_are_kept() -> None:
    one, two = weights()
    groups = make_optimizer("adamw", {"lr": 0.5}, iter([{"params": [one], "lr": 0.1}, {"params": [two]}])).param_groups
    assert [group["lr"] for group in groups] == [0.1, 0.5]
    assert [group["params"][0] is tensor for group, tensor in zip(groups, (one, two), strict=True)] == [True, True]


def test_named_parameters_are_accepted() -> None:
    one, two = weights()
    optimizer = make_optimizer("adam", {}, [("one", one), ("two", two)])  # pyright: ignore
    assert optimizer.param_groups[0]["param_names"] == ["one", "two"]


def test_users_can_register_a_name() -> None:
    @register_optimizer("halving")
    class Halving(SGD):
        pass

    assert isinstance(make_optimizer("Halving", {"lr": 1.0}, weights()), Halving)
    register_optimizer("halving")(Halving)
    with pytest.raises(UsageError, match=r"the name 'Halving' is taken by .*; register torch\.optim\.sgd\.SGD"):
        register_optimizer("Halving")(SGD)


def test_an_unknown_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.type: got 'rmsprop'; did you mean 'RMSprop'\? It is one of .*Lion"):
        make_optimizer("rmsprop", {}, weights())


def test_an_unrecognisable_name_gets_the_list() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.type: got 'zzz'; choose one of Adadelta, Adagrad"):
        make_optimizer("zzz", {}, weights())


def test_a_published_name_of_a_later_version_says_so() -> None:
    with pytest.raises(NotSupportedYet, match=r"optimizer\.type: 'MuAdam' is not supported yet"):
        make_optimizer("MuAdam", {}, weights())


def test_a_torch_class_that_is_not_elementwise_says_why() -> None:
    with pytest.raises(OptimizerError, match="LBFGS takes inner products"):
        make_optimizer("LBFGS", {}, weights())


def test_an_unknown_keyword_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(ConfigError, match=r"params\.beta: AdamW has no such keyword; did you mean 'betas'\? .*eps"):
        make_optimizer("AdamW", {"beta": 1}, weights())


def test_a_bad_value_says_which_optimizer_refused_it() -> None:
    with pytest.raises(ConfigError, match="optimizer: adam with lr=-1: Invalid learning rate: -1"):
        make_optimizer("adam", {"lr": -1}, weights())


@pytest.mark.parametrize(("key", "value", "said"), [
    ("lr", "1e-3x", "got '1e-3x'; give a number"), ("weight_decay", True, "got True; give a number"),
    ("betas", [0.9], r"got \[0\.9\]; give two numbers"), ("betas", 0.9, r"got 0\.9; give two numbers")])
def test_a_value_of_another_kind_is_named_by_its_key(key: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.params\.{key}: {said}"):
        make_optimizer("adamw", {key: value}, weights())


def test_an_unresolved_auto_is_named() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr: got 'auto', which only a trainer"):
        make_optimizer("adam", {"lr": "auto"}, weights())


def test_max_grad_norm_points_to_gradient_clipping() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params\.max_grad_norm: .* set gradient_clipping"):
        make_optimizer("adam", {"max_grad_norm": 1.0}, weights())


@pytest.mark.parametrize("keyword", ["fp32_optimizer_states", "set_grad_none"])
def test_published_switches_that_must_stay_on_are_refused_when_off(keyword: str) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.params\.{keyword}: got false; only true is supported"):
        make_optimizer("adam", {keyword: False}, weights())
