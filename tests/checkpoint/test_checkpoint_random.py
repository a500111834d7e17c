"""Restored generators draw the same numbers as generators that were never saved."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_cases import save

from shoal.checkpoint import read, rng


def draw() -> tuple[float, float, float, list[float]]:
    return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), torch.randn(3).tolist()


def test_restored_generators_draw_the_same_numbers(tmp_path: Path) -> None:
    draw()
    save(tmp_path, "a", {}, private={"rng": rng.capture()})
    expected = draw()
    with read(tmp_path) as snapshot:
        rng.restore(snapshot.private(0)["rng"])  # type: ignore[arg-type]
    assert draw() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("saved", [
    {"cuda": torch.zeros(16, dtype=torch.uint8)},  # as checkpoints had it before other kinds of devices
    {"accelerator": torch.zeros(16, dtype=torch.uint8), "accelerator_kind": "cuda"},
])
def test_random_state_of_another_kind_of_device_is_ignored(saved: dict[str, object],
                                                           caplog: pytest.LogCaptureFixture) -> None:
    rng.restore({**rng.capture(), **saved})
    assert caplog.messages == ["the checkpoint contains the random state of a device of kind cuda; ranks compute on cpu "
                               "here, so it is ignored"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_restored_gpu_generator_draws_the_same_numbers(tmp_path: Path) -> None:
    torch.randn(1, device="cuda")
    save(tmp_path, "a", {}, private={"rng": rng.capture()})
    expected = torch.randn(3, device="cuda")
    with read(tmp_path) as snapshot:
        rng.restore(snapshot.private(0)["rng"])  # type: ignore[arg-type]
    assert torch.equal(torch.randn(3, device="cuda"), expected)
