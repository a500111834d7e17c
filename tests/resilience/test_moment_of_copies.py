"""A copy is of the time between two steps: what a script does after a step is in it, or is done again."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.recording.page import PAGES
from shoal.testing import run_ranks

EVERY = 3


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def build(memory: str, stage: int, middle: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer, shoal.Engine]:
    """Return a model with the layer `middle` (or dropout), its optimizer, and its engine, whose copies are in `memory`."""
    os.environ[PAGES] = memory
    os.makedirs(memory, exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), middle or nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = shoal.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage},
        "resilience": {"vault": {"every": EVERY}}})[0]
    return model, optimizer, engine


def train(memory: str, stop: int, stage: int, dies_after_step: bool) -> tuple[int, list[int], list[float]]:
    """Train to step `stop` by a loop that works after its steps; return the first step, the evaluated steps, the weights.

    The schedule is the script's own, weights are clipped, and evaluations draw random numbers.
    """
    model, optimizer, engine = build(memory, stage)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    engine.load_checkpoint(f"{memory}/disk")
    first = schedule.last_epoch = engine.global_steps
    evaluated: list[int] = []
    while engine.global_steps < stop:
        engine.backward(engine(rows(engine.global_steps)).square().mean())
        engine.step()
        if dies_after_step and engine.global_steps == stop:
            break
        schedule.step()
        with torch.no_grad(), shoal.gathered(model, modifier_rank=0):
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
        if engine.global_steps % EVERY == 0:
            engine.eval()
            with torch.no_grad():
                engine(torch.randn(4, 8))
            engine.train()
            evaluated.append(engine.global_steps)
    with shoal.gathered(model):
        weights = [value for p in model.parameters() for value in p.detach().flatten().tolist()]
    engine.checkpointer.wait_for_copy()
    return first, evaluated, weights


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_script_does_after_a_step_is_in_the_copy(tmp_path: Path, stage: int) -> None:
    memory = str(tmp_path / "memory")
    run_ranks(2, train, memory, 8, stage, False)
    first, _, weights = run_ranks(2, train, memory, 12, stage, False)[0]
    assert first == 6
    assert weights == run_ranks(2, train, str(tmp_path / "undisturbed"), 12, stage, False)[0][2]


def test_a_rank_that_dies_after_a_step_does_again_what_follows(tmp_path: Path) -> None:
    memory = str(tmp_path / "memory")
    run_ranks(2, train, memory, 6, 2, True)
    first, evaluated, weights = run_ranks(2, train, memory, 9, 2, False)[0]
    assert (first, evaluated) == (3, [6, 9])
    assert weights == run_ranks(2, train, str(tmp_path / "undisturbed"), 9, 2, False)[0][2]


def learn_from_rollouts(memory: str, stop: int) -> list[float]:
    """Train to step `stop` on what the model itself has made, with random numbers, before each step."""
    model, _, engine = build(memory, 2)
    engine.load_checkpoint(f"{memory}/disk")
    while engine.global_steps < stop:
        engine.eval()
        with torch.no_grad():
            made = [engine(torch.randn(4, 8)) + torch.randn(4, 1) for _ in range(2)]
        engine.train()
        engine.backward(((engine(rows(engine.global_steps)) - sum(made)) ** 2).mean())
        engine.step()
    engine.checkpointer.wait_for_copy()
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


def test_rollouts_before_a_step_are_made_again_with_the_same_numbers(tmp_path: Path) -> None:
    run_ranks(2, learn_from_rollouts, str(tmp_path / "memory"), 8)
    again = run_ranks(2, learn_from_rollouts, str(tmp_path / "memory"), 11)
    assert again == run_ranks(2, learn_from_rollouts, str(tmp_path / "undisturbed"), 11)


def train_module(memory: str, stop: int, training: bool) -> list[float]:
    """Train to step `stop` by calls of the model, which has running statistics; return all of its state."""
    model, optimizer, engine = build(memory, 2, nn.BatchNorm1d(8))
    engine.load_checkpoint(f"{memory}/disk")
    if not training:  # but for a part
        model.eval()
        model[1].train()
    while engine.global_steps < stop:
        model(rows(engine.global_steps)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.checkpointer.wait_for_copy()
    return [value for tensor in model.state_dict().values() for value in tensor.detach().flatten().tolist()]


@pytest.mark.parametrize("training", [True, False])
def test_a_copy_before_a_call_of_the_model_has_no_statistics_of_it(tmp_path: Path, training: bool) -> None:
    run_ranks(2, train_module, str(tmp_path / "memory"), 8, training)
    again = run_ranks(2, train_module, str(tmp_path / "memory"), 11, training)
    assert again == run_ranks(2, train_module, str(tmp_path / "undisturbed"), 11, training)


def tune(memory: str, stop: int) -> list[float]:
    """Begin from the weights alone of another training, as fine-tuning does, and train to step `stop`."""
    model, _, engine = build(memory, 1)
    engine.load_checkpoint(f"{memory}/base", load_optimizer_states=False, load_lr_scheduler_states=False)
    while engine.global_steps < stop:
        engine.backward(engine(rows(engine.global_steps)).square().mean())
        engine.step()
    engine.checkpointer.wait_for_copy()
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


def make_base(folder: str) -> None:
    _, _, engine = build(f"{folder}/base-memory", 1)
    engine.backward(engine(rows(0)).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()


def test_a_copy_is_loaded_whole_whatever_is_left_out_of_a_folder(tmp_path: Path) -> None:
    for name in ("memory", "undisturbed"):
        run_ranks(2, make_base, str(tmp_path / name / "base"))
    run_ranks(2, tune, str(tmp_path / "memory"), 8)
    again = run_ranks(2, tune, str(tmp_path / "memory"), 11)
    assert again == run_ranks(2, tune, str(tmp_path / "undisturbed"), 11)


def restart(memory: str, folder: str, position: bool, stop: int) -> tuple[int, list[str]]:
    """Train to step `stop`, saved in `folder` after the second step; return the first step, and what was warned of."""
    warned: list[str] = []
    logging.getLogger("shoal").addHandler(handler := logging.Handler(logging.WARNING))
    handler.emit = lambda record: warned.append(record.getMessage())
    _, _, engine = build(memory, 2)
    if Path(folder).exists():
        engine.load_checkpoint(folder)
    first = engine.global_steps
    while engine.global_steps < stop:
        engine.backward(engine(rows(engine.global_steps)).square().mean())
        engine.step()
        if engine.global_steps == 2:
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
            if position:
                Path(folder, "trainer_state.json").touch()
    engine.checkpointer.wait_for_copy()
    return first, warned


@pytest.mark.parametrize(("name", "position", "step"), [
    ("checkpoint-2", False, 2), ("0002", False, 2), ("out", True, 2), ("out", False, 3), ("run-7", False, 3)])
def test_the_folder_of_one_step_is_loaded_itself(tmp_path: Path, name: str, position: bool, step: int) -> None:
    arguments = str(tmp_path / "memory"), str(tmp_path / name), position
    run_ranks(2, restart, *arguments, 5)
    first, warned = run_ranks(2, restart, *arguments, 5)[0]
    assert first == step
    told = [line for line in warned if f"is the folder of step {step} alone, from which a script knows its position" in line]
    assert len(told) == (step == 2)


def train_gan(memory: str, stop: int, critic_first: bool, stage: int) -> tuple[int, list[float]]:
    """Train a generator and its critic in turns to step `stop`; return the first step, and all of their state.

    Both have dropout and running statistics, and both are called in the half of the other. `critic_first` says which of them
    loads first.
    """
    os.environ[PAGES] = memory
    os.makedirs(memory, exist_ok=True)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, width)) for width in (4, 1)]
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
              "zero_optimization": {"stage": stage}, "resilience": {"vault": {"every": EVERY}}}
    data = torch.utils.data.TensorDataset(torch.randn(256, 4))
    generator = shoal.initialize(model=models[0], config=config)[0]
    critic, _, loader, _ = shoal.initialize(model=models[1], config=config, training_data=data)
    for engine in (critic, generator) if critic_first else (generator, critic):
        engine.load_checkpoint(f"{memory}/disk")
    first, batches = generator.global_steps, iter(loader)
    while generator.global_steps < stop:
        with torch.no_grad():
            made = generator(torch.randn(4, 4))
        critic.backward((critic(next(batches)[0]) - critic(made)).mean())
        critic.step()
        critic.module.requires_grad_(False)
        shown = next(batches)[0]  # which the generator's half takes
        generator.backward((critic(generator(torch.randn(4, 4))) - critic(shown)).mean())
        generator.step()
        critic.module.requires_grad_(True)
        if generator.global_steps % 5 == 0:
            generator.eval()
            with torch.no_grad():
                generator(torch.randn(4, 4))
            generator.train()
    for engine in (generator, critic):
        engine.checkpointer.wait_for_copy()
    with shoal.gathered(models[0]), shoal.gathered(models[1]):
        return first, [value for model in models for tensor in model.state_dict().values()
                       for value in tensor.detach().flatten().tolist()]


@pytest.mark.parametrize(("critic_first", "stage"), [(True, 2), (False, 2), (False, 3)])
def test_engines_that_step_in_turns_go_on_from_one_moment(tmp_path: Path, critic_first: bool, stage: int) -> None:
    run_ranks(2, train_gan, str(tmp_path / "memory"), 8, critic_first, stage)
    again = run_ranks(2, train_gan, str(tmp_path / "memory"), 11, critic_first, stage)
    assert again[0][0] == 6
    undisturbed = run_ranks(2, train_gan, str(tmp_path / "undisturbed"), 11, critic_first, stage)
    assert [weights for _, weights in again] == [weights for _, weights in undisturbed]
