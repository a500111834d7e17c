"""A saved tensor that changed between forward and backward raises, as in plain PyTorch; nothing else raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import UsageError
from shoal.testing import run_ranks
from shoal.zero import saved_tensors

WIDTH = 64
CASES = ("0", "1", "2", "3", "0 disk", "2 disk", "3 disk", "3 disk bf16")


class Heads(nn.Module):
    """Blocks and two heads, one of which a call uses; root and heads are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.heads = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 8 for _ in range(2))
        self.recompute: bool | None = None
        """Whether by a pass within the pass; None: nothing is."""

    def forward(self, x: Tensor, head: int = 0, *, blocks: bool = True) -> Tensor:
        for block in self.blocks if blocks else ():
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return (x @ self.heads[head]).float().square().mean()


def engine_of(folder: str, case: str, **more: Any) -> shoal.Engine:
    torch.manual_seed(0)
    disk = {"device": "nvme", "nvme_path": folder}
    tiers = {"offload_param": disk, "offload_optimizer": disk} if "disk" in case else {}
    return shoal.initialize(model=Heads(), config={
        "train_micro_batch_size_per_gpu": 2, "timeout": 20, "gradient_clipping": 0.0, "bf16": {"enabled": "bf16" in case},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": int(case[0]), **tiers},
        **more})[0]


def entry(engine: shoal.Engine, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, WIDTH, dtype=next(engine.module.parameters()).dtype, requires_grad=True)


def step(engine: shoal.Engine) -> None:
    engine.backward(engine(entry(engine, 1)))
    engine.step()


def write(engine: shoal.Engine) -> None:
    with shoal.gathered(engine.module, modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0:
            engine.module.blocks[1][0].weight.zero_()


def load(engine: shoal.Engine) -> None:
    state = engine.consolidated_state_dict()
    said = [state]
    dist.broadcast_object_list(said)
    assert said[0] is not None
    engine.load_module_state_dict(said[0])


def resume(engine: shoal.Engine, folder: str) -> None:
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)


def told(folder: str, case: str) -> None:
    changes: list[Callable[[shoal.Engine], None]] = [
        step, write, load, lambda engine: resume(engine, f"{folder}/checkpoint")]
    for number, change in enumerate(changes):
        engine = engine_of(folder, case)
        step(engine)
        loss = engine(entry(engine, 0))
        change(engine)
        lent = "disk" in case or case[0] == "3"
        whose = rf"rank {dist.get_rank()}: backward needs the weights '(blocks\.\d\.0\.weight|heads\.\d)', that was written"
        wanted = whose if lent else "modified by an inplace operation"
        with pytest.raises(UsageError if lent else RuntimeError, match=wanted):
            engine.backward(loss)
            pytest.fail(f"change {number} was not told")
        engine.destroy()


@pytest.mark.parametrize("case", CASES)
def test_backward_refuses_weights_changed_since_forward(case: str, tmp_path: Path) -> None:
    run_ranks(2, told, str(tmp_path), case)


def program(model: Heads, forward: Callable[..., Tensor], backward: Callable[[Tensor], None], step: Callable[[], None],
            write: Callable[[nn.Parameter], None]) -> None:
    """Plain training may do this: after the change, the graph still finds its saved tensors unchanged."""
    x = [torch.ones(2, WIDTH) * (i + 1) / 4 for i in range(4)]
    for recompute in (None, True, False):
        model.recompute = recompute
        first, second = (forward(x[i].requires_grad_(), i) for i in range(2))
        write(model.blocks[0][0].bias)  # which no gradient needs
        backward(first)
        step()
        backward(second)
        step()
    model.recompute = None
    other = forward(x[0], 1, blocks=False)
    for i in range(2):
        backward(forward(x[i]))  # changes all but the other head, which is in one unit with the first
        step()
    backward(other)
    step()
    backward(forward(x[3], 1))
    step()


def correct(folder: str, case: str) -> None:
    engine = engine_of(folder, case, gradient_accumulation_steps=2)
    dtype = next(engine.module.parameters()).dtype

    def write(parameter: nn.Parameter) -> None:
        with shoal.gathered(parameter, modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                parameter.add_(0.5)

    program(engine.module, lambda x, *head, **more: engine(x.to(engine.device, dtype), *head, **more), engine.backward,
            engine.step, write)
    found = engine.consolidated_state_dict(torch.float32)
    engine.destroy()
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = [0]

    def step() -> None:
        count[0] += 1
        if count[0] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    def add(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.add_(0.5)

    program(model, model, lambda loss: (loss / 2).backward(), step, add)
    for name, value in (found or {}).items():
        assert torch.allclose(value, model.state_dict()[name], atol=0.05 if "bf16" in case else 1e-5), (case, name)


@pytest.mark.parametrize("case", CASES)
def test_changes_that_plain_torch_allows_do_not_raise(case: str, tmp_path: Path) -> None:
    run_ranks(2, correct, str(tmp_path), case)


def written_to(folder: str) -> None:
    engine = engine_of(folder, "3 disk")
    hidden = torch.tanh(entry(engine, 0).to(engine.device))
    loss = engine(hidden)
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(UsageError, match=r"rank 0: backward needs a tensor of shape .*in the forward around unit "
                                         r"'blocks\.0', that was written to in place after forward"):
        engine.backward(loss)


def test_backward_refuses_activations_written_in_place(tmp_path: Path) -> None:
    run_ranks(1, written_to, str(tmp_path))


VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transposed": lambda w, x: x @ w[..., 0].t(),
    "cut": lambda w, x: x[..., :3] @ w[1:4, 2:5, 1],
    "expanded": lambda w, x: x * w[2, :, 1].expand(4, 6),
    "diagonal": lambda w, x: x * w[..., 0].t().diagonal(),
    "detached": lambda w, x: x @ w[..., 0].detach().t() @ w[..., 0],
    "complex": lambda w, x: x * torch.view_as_complex(w).abs().sum(0),
    "conjugate": lambda w, x: (x * torch.view_as_complex(w).conj() * torch.view_as_complex(w).mT.conj()).real,
    "negative": lambda w, x: x * torch.view_as_complex(w).conj().imag,
    "bits": lambda w, x: x * (w[0, :, 0].view(torch.int32) & 7) @ w[..., 1]}


class Seen(nn.Module):
    """A weight, of which a call uses one of the views."""

    def __init__(self, view: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 6, 2))
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return VIEWS[self.view](self.weight, x[0]).square().sum()


def seen() -> dict[str, tuple[Tensor, Tensor]]:
    """Return, by the view, the gradients of an input beside such a weight: by a sharded model, and by a plain one."""
    found = {}
    for view in VIEWS:
        torch.manual_seed(1)
        ours, plain = (torch.randn(1, 4 if view == "expanded" else 6, 6).requires_grad_() for _ in range(2))
        plain.data.copy_(ours)
        Seen(view)(plain).backward()
        engine = shoal.initialize(model=Seen(view), config={
            "train_micro_batch_size_per_gpu": 1, "timeout": 20, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3}})[0]
        engine.backward(engine(ours))
        assert ours.grad is not None and plain.grad is not None
        found[view] = ours.grad, plain.grad
        engine.destroy()
    return found


@pytest.mark.host("the late device knows no conjugate views")
def test_backward_finds_every_view_of_a_weight_as_forward_had_it() -> None:
    for found in run_ranks(2, seen):
        assert [view for view, (ours, plain) in found.items() if not torch.equal(ours, plain)] == []


def _saved_where_weights_were(folder: str) -> None:
    """A tensor lies where the buffer of a unit was that is gone."""
    engine, x = engine_of(folder, "3"), entry(engine_of(folder, "3"), 1)
    engine.backward(engine(x))
    assert x.grad is not None
    expected, x.grad = x.grad, None
    storage = x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  no public name
    saved_tensors._units[storage] = ref(nn.Identity())  # pyright: ignore[reportPrivateUsage, reportArgumentType]  is gone
    engine.backward(engine(x))
    assert torch.equal(x.grad, expected)
    engine_of(folder, "3")
    assert storage not in saved_tensors._units  # pyright: ignore[reportPrivateUsage]


def test_memory_where_weights_once_were_is_no_weight(tmp_path: Path) -> None:
    run_ranks(1, _saved_where_weights_were, str(tmp_path))
