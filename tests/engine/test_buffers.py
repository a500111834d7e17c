"""Models with TorchScript, sparse buffers, and buffers made in inference mode train, save and load as in plain torch."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.engine.engine import Engine
from shoal.errors import ConfigError, UsageError
from shoal.testing import run_ranks


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())


class Around(nn.Module):
    """Two `inner` modules in a list, between plain layers."""

    def __init__(self, inner: list[nn.Module]):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.ModuleList(inner), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for module in self.inner:
            x = module(x)
        return self.last(x)


class Adjacent(nn.Module):
    """A layer of a graph, whose edges are a sparse buffer."""

    def __init__(self, edges: Tensor):
        super().__init__()
        self.register_buffer("edges", edges)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((self.get_buffer("edges") @ x.T).T)


class Scaled(nn.Module):
    """A layer whose buffers were made in inference mode, where one is written to in each forward."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.register_buffer("scale", torch.full((4,), 0.5))
            self.register_buffer("shift", torch.ones(4), persistent=False)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.get_buffer("scale").mul_(1.1)
        return self.linear(x * self.get_buffer("scale").clone() + self.get_buffer("shift").clone())


KINDS = {
    "scripted": lambda: torch.jit.script(_layers()),
    "traced": lambda: torch.jit.trace(_layers(), torch.ones(3, 4), check_trace=False),
    "csr": lambda: Adjacent(torch.eye(4).to_sparse_csr()),
    "csc": lambda: Adjacent(torch.eye(4).to_sparse_csc()),
    "coo": lambda: Adjacent(torch.eye(4).to_sparse()),
    "inference": Scaled,
}


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Around([KINDS[kind](), KINDS[kind]()])


def _engine(model: nn.Module, stage: int, **sections: object) -> Engine:
    return shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 6, "gradient_clipping": 0, "timeout": 20, **sections,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})[0]


def _batches() -> list[Tensor]:
    return [torch.randn(6, 4, generator=torch.Generator().manual_seed(step)) for step in range(8)]


def _losses(engine: Engine, batches: list[Tensor]) -> list[float]:
    losses = []
    for x in batches:
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _resumed(kind: str, stage: int, folder: str) -> list[float]:
    """Train half of the batches by one engine, and the others by another that loads its checkpoint."""
    engine = _engine(_model(kind), stage)
    losses = _losses(engine, _batches()[:4])
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    engine.destroy()
    resumed = _engine(Around([KINDS[kind](), KINDS[kind]()]), stage)
    resumed.load_checkpoint(folder)
    return losses + _losses(resumed, _batches()[4:])


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning", "ignore:.torch.jit")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_and_resumes_as_plain_torch_trains(kind: str, stage: int, tmp_path: Path) -> None:
    plain, losses = _model(kind), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.01)
    for x in _batches():
        loss = plain(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for ranks in (1, 2):
        for found in run_ranks(ranks, _resumed, kind, stage, str(tmp_path / str(ranks))):
            assert found == pytest.approx(losses, rel=1e-5)


class Counts(nn.Module):
    """Replaces a buffer in each forward: in inference mode by a tensor that counts no writes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + x.detach().sum()
        return self.linear(x)


def _counted() -> list[float]:
    model = Counts()
    engine = _engine(model, 2)
    x = torch.full((6, 4), 1.0 + engine.global_rank)
    with torch.inference_mode():
        engine(x)
    engine.backward(model.linear(x).sum())  # a call of a part writes to no buffer
    engine.step()
    return model.get_buffer("count").tolist()


def test_a_buffer_that_an_evaluation_replaced_is_rank_0s_everywhere() -> None:
    assert run_ranks(2, _counted) == [[24.0, 24.0]] * 2


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_a_sparse_buffer_is_said_to_be_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    _engine(Adjacent(torch.eye(4).to_sparse_csr()), 0)
    assert "the buffer 'edges' of the Adjacent has the layout torch.sparse_csr, and is neither sent" in caplog.text


def _loaded() -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(_layers()), file)
    file.seek(0)
    return Around([torch.jit.load(file)])


def _made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(4, 4)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize(("make", "error"), [
    (lambda: torch.jit.script(_layers()), "initialize: model is a RecursiveScriptModule, which takes no hooks; pass the"),
    (_loaded, "initialize: parameter 'inner.0.0.weight' is a Tensor, as those of a module that torch.jit.load returns"),
    (_made_in_inference_mode, r"initialize: parameter 'weight' was made within torch.inference_mode\(\), which no step may"),
], ids=["model", "loaded", "parameter"])  # fmt: skip
def test_what_no_engine_can_train_is_named(make: object, error: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=error):
        _engine(make(), 0)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("section", [{"recompute": "full"}, {"budget": "1MB"}])
def test_recompute_refuses_blocks_with_torchscript(section: dict[str, str]) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), torch.jit.script(_layers())) for _ in range(2)])
    with pytest.raises(ConfigError, match=r"got .*; '1' in a Sequential is a TorchScript module, and torch's checkpoint"):
        _engine(model, 0, activation_checkpointing=section)
