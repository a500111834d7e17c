"""Lion against its formula, written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.optim import Lion


def reference(weight: torch.Tensor, gradients: list[torch.Tensor], lr: float, betas: tuple[float, float],
              decay: float) -> torch.Tensor:
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        update = torch.sign(betas[0] * momentum + (1 - betas[0]) * gradient)
        weight = weight - lr * (update + decay * weight)
        momentum = betas[1] * momentum + (1 - betas[1]) * gradient
    return weight


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-4, 0.1), st.floats(0, 0.999), st.floats(0, 0.999), st.sampled_from([0.0, 0.1]), st.integers(0, 99))
def test_lion_is_its_formula(lr: float, beta1: float, beta2: float, decay: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    start, *gradients = torch.randn(6, 7, generator=random, dtype=torch.float64)
    weight = start.clone().requires_grad_()
    optimizer = Lion([weight], lr=lr, betas=(beta1, beta2), weight_decay=decay)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    expected = reference(start, list(gradients), lr, (beta1, beta2), decay)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_groups_keep_their_rate_and_parameters_without_gradient_stay() -> None:
    slow, fast, still = (torch.ones(2, requires_grad=True) for _ in range(3))
    optimizer = Lion([{"params": [slow, still], "lr": 0.1}, {"params": [fast]}], lr=0.5)
    slow.grad = fast.grad = torch.ones(2)
    optimizer.step()
    assert [slow[0].item(), fast[0].item(), still[0].item()] == pytest.approx([0.9, 0.5, 1.0])
    assert still not in optimizer.state


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    weight = torch.ones(1, requires_grad=True)
    optimizer = Lion([weight], lr=0.25)

    def closure() -> float:
        (weight * 3).sum().backward()
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert weight.item() == 0.75


def test_a_reloaded_state_continues_bitwise() -> None:
    gradients = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    one, two = torch.zeros(5, requires_grad=True), torch.zeros(5, requires_grad=True)
    first, second = Lion([one]), Lion([two])
    for gradient in gradients[:3]:
        one.grad = gradient
        first.step()
    second.load_state_dict(first.state_dict())
    two.data.copy_(one)
    for gradient in gradients[3:]:
        one.grad = two.grad = gradient
        first.step()
        second.step()
    assert torch.equal(one, two)


def test_negative_rates_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Lion: got lr=-1, weight_decay=0\.0; neither may be negative"):
        Lion([torch.ones(1)], lr=-1)


def test_betas_of_one_or_more_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Lion: got betas=\(0\.9, 1\.0\); both must be at least 0 and below 1"):
        Lion([torch.ones(1)], betas=(0.9, 1.0))
