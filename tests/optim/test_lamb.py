"""LAMB on whole parameters against its formula, written out; and the native passes against torch's."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.errors import ConfigError
from shoal.native import step as native
from shoal.optim import Lamb, make_optimizer
from shoal.optim.lamb import Constants, constants, sum_of_squares
from shoal.optim.onebit_lamb import OneBitLamb


def reference(w: Tensor, gradients: list[Tensor], *, lr: float, betas: tuple[float, float], eps: float, decay: float,
              low: float, high: float, corrected: bool, inside: bool) -> tuple[Tensor, float]:
    m, v, c = torch.zeros_like(w), torch.zeros_like(w), 1.0
    for t, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat, v_hat = (m / (1 - betas[0]**t), v / (1 - betas[1]**t)) if corrected else (m, v)
        u = m_hat / ((v_hat + eps).sqrt() if inside else v_hat.sqrt() + eps) + decay * w
        c = (w.norm() / u.norm()).clamp(low, high).item() if w.norm() * u.norm() > 0 else 1.0
        w = w - lr * c * u
    return w, c


def stepped(weight: Tensor, gradients: list[Tensor], **options: Any) -> Lamb:
    """Step `weight` in place."""
    optimizer = Lamb([weight.requires_grad_()], **options)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    return optimizer


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-4, 0.1), st.floats(0, 0.999), st.floats(0, 0.999), st.sampled_from([0.0, 0.1]), st.booleans(),
       st.booleans(), st.sampled_from([(0.01, 10.0), (0.9, 10.0), (0.01, 0.1), (0.3, 0.3)]), st.integers(0, 99))
def test_lamb_is_its_formula(lr: float, beta1: float, beta2: float, decay: float, corrected: bool, inside: bool,
                             bounds: tuple[float, float], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    start, *gradients = torch.randn(6, 7, 5, generator=random, dtype=torch.float64)
    weight = start.clone()
    optimizer = stepped(weight, gradients, lr=lr, betas=(beta1, beta2), eps=1e-3, weight_decay=decay, min_coeff=bounds[0],
                        max_coeff=bounds[1], bias_correction=corrected, eps_inside_sqrt=inside)
    expected, coefficient = reference(start, gradients, lr=lr, betas=(beta1, beta2), eps=1e-3, decay=decay, low=bounds[0],
                                      high=bounds[1], corrected=corrected, inside=inside)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-12)
    assert optimizer.get_lamb_coeffs() == pytest.approx([coefficient], rel=1e-9)


def test_adam_is_lamb_with_trust_ratio_one() -> None:
    start, *gradients = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    weight, other = start.clone(), start.clone().requires_grad_()
    stepped(weight, gradients, lr=1e-2, weight_decay=0.1, min_coeff=1.0, max_coeff=1.0)
    adam = torch.optim.AdamW([other], lr=1e-2, weight_decay=0.1)
    for gradient in gradients:
        other.grad = gradient
        adam.step()
    torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-6)


def test_zero_parameters_and_zero_updates_have_trust_ratio_one() -> None:
    weights = [torch.zeros(3), torch.ones(3), torch.ones(()), torch.ones(2)]
    optimizer = Lamb([weight.requires_grad_() for weight in weights], lr=0.5)
    weights[0].grad, weights[1].grad, weights[2].grad = torch.ones(3), torch.zeros(3), torch.tensor(4.0)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0, 1.0, pytest.approx(1.0)]
    torch.testing.assert_close(weights[0].detach(), torch.full((3,), -0.5))
    assert weights[1].tolist() == [1.0] * 3 and weights[3].tolist() == [1.0] * 2
    assert weights[3] not in optimizer.state


def test_nan_gradients_give_nan_weights() -> None:
    weight = torch.ones(3)
    stepped(weight, [torch.tensor([1.0, float("nan"), 1.0])])
    assert weight.isnan().all()


def test_groups_have_their_own_options_and_state_is_reloaded() -> None:
    one, two = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = make_optimizer("LAMB", {"betas": [0.5, 0.5]}, [{"params": [one], "lr": 0.5}, {"params": [two], "lr": 0.0}])
    for weight in (one, two):
        weight.grad = torch.ones(2)
    loss = optimizer.step(lambda: 3.0)
    assert loss == 3.0 and one.tolist() == [0.5, 0.5] and two.tolist() == [1.0, 1.0]
    again = make_optimizer("lamb", {}, [{"params": [one]}, {"params": [two]}])
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["betas"] == (0.5, 0.5) and again.state[one]["step"] == 1


@pytest.mark.parametrize(("options", "said"), [
    ({"lr": -1.0}, "lr=-1.0.*none may be negative"), ({"eps": -1.0}, "none may be negative"),
    ({"betas": (0.9, 1.0)}, "both must be at least 0 and below 1"), ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff=2.0"),
    ({"min_coeff": 0.0}, "above 0"), ({"amsgrad": True}, "no such variant"), ({"max_grad_norm": 1.0}, "gradient_clipping"),
])
def test_an_invalid_option_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"Lamb: got .*{said}"):
        Lamb([torch.zeros(1)], **options)


def test_sums_of_squares_are_those_of_fp64() -> None:
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    assert sum_of_squares(values).item() == pytest.approx(values.double().square().sum().item(), rel=1e-12)


# Native

SIZE = 100_003
ENDS = [1, 8, 1031, 50_000, SIZE]


def terms(time: int, *, signed: bool) -> Constants:
    plain = constants(Lamb([torch.zeros(1)], weight_decay=0.1).param_groups[0], time)
    return replace(plain, look_ahead=0.1, variance_floor=0.5) if signed else plain


def native_steps(dtype: torch.dtype, *, signed: bool) -> list[Tensor]:
    """Return the tensors after two native steps, in pieces that end at `ENDS`."""
    random = torch.Generator().manual_seed(0)
    master, *gradients = torch.randn(3, SIZE, generator=random)
    moments, weight = [torch.zeros(SIZE), torch.zeros(SIZE)], torch.empty(SIZE, dtype=dtype)
    sums = torch.empty(0)
    for time, values in enumerate(gradients, 1):
        gradient, c = values.to(dtype), astuple(terms(time, signed=signed))
        sums = native.measure(master, moments, gradient, ENDS, c, factor=0.5, addend=gradient.flip(0) if signed else None,
                              addends=4)
        native.apply(master, moments, ENDS, c, [0.01 * (1 + i) for i in range(len(ENDS))], gradient=gradient, factor=0.5,
                     weight=weight)
    return [master, *moments, weight, sums]


@pytest.mark.skipif(not native.available(), reason="native code needs a C++ compiler")
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", native.DTYPES)
def test_native_passes_match_torch_bit_for_bit_on_any_number_of_threads(dtype: torch.dtype, signed: bool) -> None:
    master, first, second, weight, sums = native_steps(dtype, signed=signed)
    assert torch.equal(weight, master.to(dtype))
    random = torch.Generator().manual_seed(0)
    expected, *gradients = torch.randn(3, SIZE, generator=random)
    optimizer = OneBitLamb([expected], weight_decay=0.1)
    optimizer.constants = lambda group, state: terms(int(state["step"]), signed=signed)
    group, parts = optimizer.param_groups[0], [slice(*ends) for ends in zip([0, *ENDS], ENDS, strict=False)]
    for values in gradients:
        rounded = values.to(dtype).float()
        gradient, addend = 0.5 * rounded, 0.5 * rounded.flip(0)
        optimizer.update_moments(expected, gradient, group, addend if signed else None, 4)
        found = torch.stack([optimizer.norm_squares(expected, group, part) for part in parts])
        for index, part in enumerate(parts):
            expected[part] -= 0.01 * (1 + index) * optimizer.compute_update(expected, group, part, gradient)
    for one, other in ((master, expected), (first, optimizer.state[expected]["exp_avg"]),
                       (second, optimizer.state[expected]["exp_avg_sq"]), (sums, found)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, native_steps(dtype, signed=signed), [master, first, second, weight, sums]))
    finally:
        torch.set_num_threads(threads)
