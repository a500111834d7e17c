"""torch.compile, whatever it is given, compiles few graphs, each once, and training is that of the compiled plain model."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import Unsupported
from torch.optim import SGD

import shoal
from shoal.checkpoint import inspect
from shoal.engine.engine import Engine
from shoal.testing import run_ranks

from ..pipeline import small
from ..zero.models import Block, Plain, batch, loss_of
from .trained import model, same, weights

RANKS, STEPS, LR = 2, 3, 0.25

pytestmark = pytest.mark.filterwarnings("default")  # torch's own


class Graphs:
    """A backend that counts the graphs that it compiles."""

    def __init__(self, name: str = "aot_eager"):
        self.backend = lookup_backend(name)
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return self.backend(graph, inputs)


def initialized(net: nn.Module, stage: int) -> Engine:
    config = {"train_micro_batch_size_per_gpu": 2, "timeout": 20, "gradient_clipping": 0.0,
              "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    return shoal.initialize(model=net, optimizer=SGD(net.parameters(), lr=LR), config=config)[0]


def wrapped_model(net: Any, stage: int, backend: Graphs) -> tuple[Engine, Any]:
    engine = initialized(torch.compile(net, backend=backend), stage)
    return engine, engine


def compiled_model(net: Any, stage: int, backend: Graphs) -> tuple[Engine, Any]:
    net.compile(backend=backend)
    engine = initialized(net, stage)
    return engine, engine


def wrapped_blocks(net: Any, stage: int, backend: Graphs) -> tuple[Engine, Any]:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = torch.compile(block, backend=backend)
    engine = initialized(net, stage)
    return engine, engine


def compiled_blocks(net: Any, stage: int, backend: Graphs) -> tuple[Engine, Any]:
    for block in net.blocks:
        block.compile(backend=backend, fullgraph=True)
    engine = initialized(net, stage)
    return engine, engine


def wrapped_engine(net: Any, stage: int, backend: Graphs) -> tuple[Engine, Any]:
    engine = initialized(net, stage)
    return engine, torch.compile(engine, backend=backend)


def compiled_engine(net: Any, stage: int, backend: Graphs) -> tuple[Engine, Any]:
    engine = initialized(net, stage)
    engine.compile(backend=backend)
    return engine, engine


WAYS = (wrapped_model, compiled_model, wrapped_blocks, compiled_blocks, wrapped_engine, compiled_engine)


def plain() -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train the compiled plain model on the batches of all ranks; return the losses by step and rank, and the weights."""
    net = model()
    optimizer, forward = SGD(net.parameters(), lr=LR), torch.compile(net, backend="aot_eager")
    losses = []
    for step in range(STEPS):
        of_ranks = torch.stack([loss_of(forward(tokens), targets) for tokens, targets in
                                (batch(step, 0, rank) for rank in range(RANKS))])
        of_ranks.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(of_ranks.detach())
    return losses, dict(net.named_parameters())


def every_way(stage: int) -> dict[str, list[int]]:
    """Train in every way, compare with the plain model, and return the graphs compiled by the end of each step."""
    expected, trained = plain()
    counts: dict[str, list[int]] = {}
    for way in WAYS:
        torch._dynamo.reset()
        graphs = Graphs("aot_eager" if way is wrapped_model else "eager")
        engine, called = way(model(), stage, graphs)
        counted = counts[way.__name__] = []
        for step in range(STEPS):
            tokens, targets = batch(step, 0, engine.global_rank)
            loss = loss_of(called(tokens), targets)
            called.backward(loss)
            called.step()
            assert torch.equal(loss.detach(), expected[step][engine.global_rank]), (way.__name__, step)
            counted.append(graphs.count)
        assert same(weights(engine), trained), way.__name__
        engine.destroy()
    return counts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_way_to_compile_is_exact_in_two_graphs_or_three_at_stage_3(stage: int) -> None:
    most = 3 if stage == 3 else 2  # the embedding alone, whose call may be a pass of its own
    for counts in run_ranks(RANKS, every_way, stage):
        assert set(counts) == {way.__name__ for way in WAYS}
        for way, counted in counts.items():
            assert counted[-1] <= most and counted == counted[:1] * STEPS, (way, counted)


def names(folder: str) -> None:
    """Save and load a checkpoint of a model with wrappers at two depths."""
    net: Any = model()
    net.blocks[1] = wrapper = torch.compile(net.blocks[1], backend="eager")
    engine, uncompiled = initialized(torch.compile(net, backend="eager"), 1), initialized(model(), 3)
    assert engine.module is net and engine.is_compiled
    assert [*engine.module_state_dict()] == [name for name, _ in model().named_parameters()]
    uncompiled.save_checkpoint(folder, "uncompiled")
    uncompiled.wait_for_checkpoint()
    engine.save_checkpoint(folder, "compiled")
    engine.wait_for_checkpoint()
    assert uncompiled.load_checkpoint(folder)[0] is not None
    compared = [{line.name for line in inspect(folder, tag).tensors} for tag in ("compiled", "uncompiled")]
    assert compared[0] == compared[1]
    assert same(weights(uncompiled), weights(engine))
    engine.destroy()
    assert net.blocks[1] is wrapper and not engine.is_compiled


def test_checkpoints_of_compiled_models_have_clean_names(tmp_path: Path) -> None:
    run_ranks(1, names, str(tmp_path))


def copies() -> None:
    engine = initialized(torch.compile(model(), backend="eager"), 1)
    copied = copy.deepcopy(engine.module)
    stored = io.BytesIO()
    torch.save(engine.module, stored)
    loaded = torch.load(io.BytesIO(stored.getvalue()), weights_only=False)
    tokens = batch(0, 0, 0)[0]
    for other in (copied, loaded):
        torch.testing.assert_close(other(tokens), engine(tokens), rtol=0, atol=0)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert not other(tokens).any() and engine(tokens).any()


def test_a_copy_of_a_compiled_model_runs_its_own_weights() -> None:
    run_ranks(1, copies)


class Sequential(Plain):
    """Blocks in a `Sequential`, whose forward is torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))  # type: ignore[assignment]

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.embed(tokens))


def sequentials(stage: int) -> list[int]:
    counts = []
    for make in (Sequential, lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())):
        torch._dynamo.reset()
        graphs = Graphs("eager")
        torch.manual_seed(0)
        engine = initialized(torch.compile(make(), backend=graphs), stage)
        for _ in range(2):
            inputs = torch.zeros(1, 3, dtype=torch.long) if make is Sequential else torch.ones(1, 4)
            engine.backward(engine(inputs).sum())
            engine.step()
        counts.append(graphs.count)
    return counts


def test_models_whose_forward_is_torchs_own_are_compiled() -> None:
    for stage, expected in ((1, [1, 1]), (3, [3, 2])):
        assert run_ranks(2, sequentials, stage) == [expected] * 2, stage


def whole_graph(stage: int) -> str:
    graphs = Graphs("eager")
    net = model()
    net.compile(backend=graphs, fullgraph=True)
    engine = initialized(net, stage)
    try:
        engine(batch(0, 0, 0)[0])
    except Unsupported as error:
        return str(error)
    return f"{graphs.count} graphs"


def test_one_graph_around_sharded_blocks_is_refused_with_the_fix() -> None:
    assert run_ranks(1, whole_graph, 1) == ["1 graphs"]
    [refusal] = run_ranks(1, whole_graph, 3)
    assert "compile the blocks, by engine.compile()" in refusal


def divided() -> int:
    graphs = Graphs("eager")
    engine = initialized(torch.compile(model(), backend=graphs, fullgraph=True), 3)
    engine(batch(0, 0, 0)[0])
    return graphs.count


def test_a_wrapped_model_is_divided_into_whole_graphs_of_its_blocks() -> None:
    assert run_ranks(2, divided) == [1, 1]


def failed() -> None:
    net: Any = model()
    net.blocks[0] = wrapper = torch.compile(net.blocks[0], backend="eager")
    with pytest.raises(shoal.ShoalError):
        shoal.initialize(model=net, config={"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adamm"}})
    assert net.blocks[0] is wrapper


def test_a_model_gets_its_wrappers_back_when_initialize_fails() -> None:
    run_ranks(1, failed)


def pipeline() -> tuple[list[float], list[float], int]:
    """Return the losses of a pipeline that is not compiled, those of one that is, and its graphs."""
    case = small.Case(stages=2, tied=False)
    plain = small.train(case, steps=2).losses
    graphs = Graphs()
    engine, *_ = shoal.initialize(model=torch.compile(case.module(), backend=graphs), config=case.settings)
    return plain, [engine.train_batch(small.data(step, 0)).item() for step in range(2)], graphs.count


def test_the_stages_of_a_wrapped_pipeline_module_are_compiled() -> None:
    for plain, compiled, graphs in run_ranks(2, pipeline):
        assert plain == compiled and graphs > 0
