"""The products under nn.Linear: oneDNN's equal torch's, "torch" changes nothing, and modules stay what they are."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal import products
from shoal.errors import ConfigError
from shoal.nn import probe, set_linear_kernels
from shoal.products import ONEDNN, TORCH, onednn_missing
from shoal.tensor_parallel import ColumnLinear, RowLinear, VocabularyHead
from shoal.testing import run_ranks

needs_onednn = pytest.mark.skipif(onednn_missing() is not None, reason="this torch has no oneDNN")
ROWS, INPUTS, OUTPUTS = 256, 192, 256
"""Large enough for every product of oneDNN."""


def pair(choice: probe.Choice = "onednn", **more: Any) -> tuple[nn.Linear, nn.Linear, Tensor]:
    torch.manual_seed(0)
    plain = nn.Linear(INPUTS, OUTPUTS, **more)
    mine = copy.deepcopy(plain)
    assert set_linear_kernels(mine, choice) == (choice != "torch")
    return plain, mine, torch.randn(2, ROWS // 2, INPUTS)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_equal_torchs(bias: bool) -> None:
    plain, mine, x = pair(bias=bias)
    outcomes: list[list[Tensor]] = []
    for module in (plain, mine):
        y = module(leaf := x.clone().requires_grad_())
        outcomes.append([y, *torch.autograd.grad((y * y.detach().cos()).sum(), [leaf, *module.parameters()])])
    for got, want in zip(*outcomes, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_each_product_is_the_one_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> None:
        kernel = getattr(products, name)

        def call(*operands: Tensor | None) -> Tensor:
            calls.append(name)
            return kernel(*operands)

        monkeypatch.setattr(products, name, call)

    counted("onednn_product")
    counted("onednn_weight_gradient")
    _, mine, x = pair()
    mine(x.requires_grad_()).sum().backward()
    assert calls == ["onednn_product", "onednn_product", "onednn_weight_gradient"]
    mine(x[:1, :4])
    assert len(calls) == 3, "a small product is torch's"


def test_torch_takes_the_kernels_back_bit_for_bit() -> None:
    plain, mine, x = pair("auto")
    set_linear_kernels(mine, "torch")
    assert "forward" not in vars(mine)
    assert torch.equal(plain(x), mine(x))


def test_modules_of_other_classes_and_with_own_forwards_stay() -> None:
    class Special(nn.Linear):
        pass

    own = nn.Linear(4, 4)
    own.forward = lambda input: input
    assert set_linear_kernels(nn.ModuleList([Special(4, 4), own]), "auto") == 0


@needs_onednn
def test_state_dict_copy_and_pickle_stay() -> None:
    plain, mine, x = pair()
    assert mine.state_dict().keys() == plain.state_dict().keys()
    copied = copy.deepcopy(mine)
    with torch.no_grad():
        copied.weight.zero_()
    torch.testing.assert_close(copied(x), copied.bias.expand(2, ROWS // 2, OUTPUTS))
    assert torch.equal(pickle.loads(pickle.dumps(mine))(x), plain(x))


@needs_onednn
def test_a_model_that_was_unpickled_takes_kernels_again() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert set_linear_kernels(model, "onednn") == len(model)
    twin = pickle.loads(pickle.dumps(model))
    assert set_linear_kernels(twin, "onednn") == len(model)
    assert set_linear_kernels(twin, "torch") == len(model)
    nn.utils.parametrizations.weight_norm(model[0])
    assert set_linear_kernels(model, "torch") == len(model)
    assert not any("forward" in vars(module) for each in (model, twin) for module in each)


@needs_onednn
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in its rules of forward mode
def test_second_derivatives_and_function_transforms_are_torchs() -> None:
    plain, mine, x = pair()
    penalties: list[Tensor] = []
    for module in (plain, mine):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(module(leaf).square().sum(), leaf, create_graph=True)
        penalties.append(torch.autograd.grad(first.square().sum(), module.weight)[0])
        parameters: dict[str, Tensor] = dict(module.named_parameters())

        def loss(values: dict[str, Tensor], module: nn.Module = module) -> Tensor:
            return torch.func.functional_call(module, values, (x,)).square().sum()

        penalties.append(torch.func.grad(loss)(parameters)["weight"])
        penalties.append(torch.func.jvp(module, (x,), (x,))[1])
    for want, got in zip(penalties[:3], penalties[3:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2)


@needs_onednn
def test_autocast_16_bits_and_compile_are_torchs() -> None:
    plain, mine, x = pair()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mine(x), plain(x))
    graph = torch.compile(mine, backend="eager", fullgraph=True)
    assert torch.equal(graph(x), plain(x))
    assert torch.equal(mine.bfloat16()(x.bfloat16()), plain.bfloat16()(x.bfloat16()))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def train(linear: str, stage: int, recompute: str, **more: Any) -> Tensor:
    model = Blocks()
    engine, *_ = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 256, "zero_optimization": {"stage": stage}, "kernels": {"linear": linear},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "activation_checkpointing": {"recompute": recompute}, **more})
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        engine.backward(engine(torch.randn(256, 128).to(torch.bfloat16 if "bf16" in more else torch.float32)))
        engine.step()
    with shoal.gathered([*model.parameters()]):
        return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def alike_everywhere() -> None:
    wanted = train("torch", 0, "none")
    of_onednn = train("onednn", 0, "none")
    torch.testing.assert_close(of_onednn, wanted)
    for stage, recompute in ((3, "none"), (3, "full"), (2, "selective")):
        torch.testing.assert_close(train("onednn", stage, recompute), of_onednn)
    bf16 = {"bf16": {"enabled": True}}
    assert torch.equal(train("onednn", 3, "none", **bf16), train("torch", 3, "none", **bf16))


@needs_onednn
def test_the_key_trains_as_torch_under_zero_and_recompute() -> None:
    run_ranks(2, alike_everywhere)


def test_the_probe_measures_once_and_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    measured: list[int] = []

    def measure() -> probe.Rates:
        measured.append(1)
        fast, slow = {"torch": 90.0, "onednn": 200.0}, {"torch": 90.0, "onednn": 92.0}
        return {"forward": fast, "input_gradient": fast, "weight_gradient": slow}

    monkeypatch.setattr(probe, "_measure", measure)
    monkeypatch.setattr(probe, "onednn_missing", lambda: None)
    for damage in (False, False, True):
        probe.probed.cache_clear()
        if damage:
            (tmp_path / "linear.json").write_text("{")
        chosen = probe.choose("auto")
        assert (chosen.forward, chosen.input_gradient, chosen.weight_gradient) == ("onednn", "onednn", "torch")
    assert len(measured) == 2, "the second process reads the file; a damaged one is measured again"
    (key,) = json.loads((tmp_path / "linear.json").read_text())
    assert torch.__version__ in key
    (line,) = probe.recorded()  # which `shoal doctor` shows
    assert line.startswith(f"{key}: linear layers: forward onednn, input gradient onednn, weight gradient torch (GFLOP/s ")
    probe.probed.cache_clear()


def test_without_onednn_auto_is_torch_and_onednn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    probe.probed.cache_clear()
    for module in (probe, products):
        monkeypatch.setattr(module, "onednn_missing", lambda: "this torch is built without oneDNN")
    assert probe.choose("auto") == TORCH
    with pytest.raises(ConfigError, match=r"kernels\.linear: got 'onednn', and this torch is built without oneDNN"):
        set_linear_kernels(nn.Linear(2, 2), "onednn")
    probe.probed.cache_clear()


def test_off_the_host_the_products_are_torchs() -> None:
    assert probe.choose("auto", torch.device("meta")) == TORCH
    assert ONEDNN.linear(torch.randn(4, 4, device="meta"), torch.randn(4, 4, device="meta")).device.type == "meta"


def tensor_parallel(choice: probe.Choice, sequence_dim: int | None) -> list[Tensor]:
    """Return output and gradients of a column, a row and a head layer, whose slices are large enough for oneDNN."""
    torch.manual_seed(0)
    group = dist.group.WORLD
    assert group is not None
    model = nn.Sequential(
        ColumnLinear.from_linear(nn.Linear(INPUTS, 2 * OUTPUTS), group, sequence_dim=sequence_dim),
        RowLinear.from_linear(nn.Linear(2 * OUTPUTS, INPUTS), group, sequence_dim=sequence_dim),
        VocabularyHead.from_linear(nn.Linear(INPUTS, 2 * OUTPUTS), group, sequence_dim=sequence_dim, gather_output=False))
    assert set_linear_kernels(model, choice) == 3
    x = torch.randn(2, ROWS, INPUTS).requires_grad_()
    y = model(x if sequence_dim is None else x.chunk(2, sequence_dim)[dist.get_rank()])
    return [y.detach(), *torch.autograd.grad(y.square().mean(), [x, *model.parameters()])]


@needs_onednn
@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_tensor_parallel_layers_have_these_products(sequence_dim: int | None) -> None:
    mine, plain = (run_ranks(2, tensor_parallel, choice, sequence_dim) for choice in ("onednn", "torch"))
    assert any(not torch.equal(a, b) for a, b in zip(mine[0], plain[0], strict=True))  # sums in another order
    for got, want in zip(mine, plain, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@needs_onednn
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
def test_a_traced_product_is_torchs() -> None:
    _, mine, x = pair()
    traced = torch.jit.trace(mine, (x,))
    assert torch.equal(traced(2 * x), nn.functional.linear(2 * x, mine.weight, mine.bias))
