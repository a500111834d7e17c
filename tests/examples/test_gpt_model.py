"""Laws of the example's model and of how it is judged."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from corpus import Blocks
from evaluate import bits_per_byte, generate
from model import GPT, PRESETS, VOCABULARY, Shape
from shoal.testing import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return Shape(layers=2, dim=16, heads=2, ngrams=2, rows=64).build()


@pytest.mark.parametrize(("name", "millions"), [("tiny", 0.13), ("3m", 3.0), ("30m", 29.8), ("124m", 123.3)])
def test_a_preset_is_as_large_as_its_name_says(name: str, millions: float) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in PRESETS[name].build().parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


def test_no_byte_sees_what_comes_after_it(model: GPT) -> None:
    text = torch.randint(VOCABULARY, (1, 20))
    changed = text.clone()
    changed[0, 12] = (changed[0, 12] + 1) % VOCABULARY
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12], after[:, 12])


def test_the_loss_is_the_mean_cross_entropy_of_the_logits(model: GPT) -> None:
    x, y = torch.randint(VOCABULARY, (2, 3, 10))
    expected = -torch.log_softmax(model(x), -1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(model(x, y), expected)


def test_the_same_seed_writes_the_same_bytes_after_a_long_prompt(model: GPT) -> None:
    first, second = (bytes(generate(model, b"prompt" * 10, 12, window=16, device=CPU, seed=3)) for _ in range(2))
    assert first == second and len(first) == 12


def uniform(x: Tensor) -> Tensor:
    return torch.zeros(*x.shape, VOCABULARY)


def knows_position(x: Tensor) -> Tensor:
    """Certain of the next byte in the second half of a block, and lost in the first."""
    logits = torch.zeros(*x.shape, VOCABULARY)
    half = x.shape[1] // 2
    logits[:, half:].scatter_(-1, ((x[:, half:] + 1) % VOCABULARY)[..., None], 1000.0)
    return logits


def judge(forward: str, path: Path, stride: int) -> float:
    return bits_per_byte(globals()[forward], Blocks(path, 8, stride), CPU, tokens=24)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bits_per_byte_count_every_byte_once_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "bytes.bin"
    path.write_bytes(bytes(range(73)))
    assert run_ranks(ranks, judge, "uniform", path, 8) == [pytest.approx(8.0)] * ranks
    assert run_ranks(ranks, judge, "knows_position", path, 8) == [pytest.approx(4.0)] * ranks
    overlapping = 8 * 4 / 72  # only the first half of the first block is not known
    assert run_ranks(ranks, judge, "knows_position", path, 4) == [pytest.approx(overlapping)] * ranks


def test_an_untrained_model_costs_about_8_bits(model: GPT) -> None:
    x = torch.randint(VOCABULARY, (4, 64))
    assert model(x[:, :-1], x[:, 1:]).item() / math.log(2) == pytest.approx(8, abs=0.5)
