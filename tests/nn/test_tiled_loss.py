"""The loss in tiles is torch's cross entropy, with its gradients, for every option, dtype, head and stage."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shoal
from shoal.errors import NotServed, UsageError
from shoal.mesh.tensor_slice import stretch
from shoal.nn import TiledHead, TiledLoss, TiledMLP, tiled_cross_entropy, tiled_head, use_tiled_loss
from shoal.tensor_parallel import VocabularyHead
from shoal.testing import run_ranks

WORDS, WIDTH = 37, 8


def operands(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, WIDTH, dtype=dtype), torch.randn(WORDS, WIDTH, dtype=dtype)
    targets = torch.randint(WORDS, (2, 5))
    targets[0, :2] = -100
    return (hidden.requires_grad_(), weight.requires_grad_(), targets,
            torch.randn(WORDS, dtype=dtype).requires_grad_() if bias else None)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, loss: TiledLoss) -> Tensor:
    """The oracle: the whole logits, and autograd."""
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    flat = targets.flatten()
    result = F.cross_entropy(logits, flat, ignore_index=loss.ignore_index, label_smoothing=loss.label_smoothing,
                             reduction=loss.reduction)
    if not loss.z_loss:
        return result.view(targets.shape) if loss.reduction == "none" else result
    counted = flat != loss.ignore_index
    auxiliary = loss.z_loss * logits.logsumexp(-1).square() * counted
    match loss.reduction:
        case "none":
            return (result + auxiliary).view(targets.shape)
        case "sum":
            return result + auxiliary.sum()
        case "mean":
            return result + auxiliary.sum() / counted.sum()


def gradients(loss: Tensor, tensors: tuple[Tensor | None, ...], factor: float = 3.0) -> tuple[Tensor, ...]:
    weight = torch.arange(1, loss.numel() + 1, dtype=loss.dtype).view(loss.shape) * factor
    return torch.autograd.grad((loss * weight).sum(), [each for each in tensors if each is not None])


@pytest.mark.parametrize(("reduction", "smoothing", "z_loss", "recompute"), [
    *itertools.product(("mean", "sum", "none"), (0.0, 0.1), (0.0, 0.01), (None,)), ("mean", 0.1, 0.01, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_gradients_are_those_of_whole_logits(reduction: Any, smoothing: float, z_loss: float,
                                                      recompute: bool | None, dtype: torch.dtype) -> None:
    for rows, bias in ((3, True), (64, False)):
        hidden, weight, targets, b = operands(dtype, bias=bias)
        loss = TiledLoss(reduction=reduction, label_smoothing=smoothing, z_loss=z_loss, rows=rows, recompute=recompute)
        mine = tiled_cross_entropy(hidden, weight, targets, b, loss=loss)
        wanted = plain(hidden, weight, targets, b, loss)
        torch.testing.assert_close(mine, wanted)
        for got, want in zip(gradients(mine, (hidden, weight, b)), gradients(wanted, (hidden, weight, b)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5 if dtype == torch.float64 else 1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_gradients_are_as_close_as_those_of_whole_logits(dtype: torch.dtype) -> None:
    hidden, weight, targets, _ = operands(dtype)
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    oracle = gradients(plain(exact[0], exact[1], targets, None, TiledLoss()), (exact[0], exact[1]), 64.0)
    mine = gradients(tiled_cross_entropy(hidden, weight, targets, loss=TiledLoss(rows=3)), (hidden, weight), 64.0)
    theirs = gradients(plain(hidden, weight, targets, None, TiledLoss()), (hidden, weight), 64.0)
    for got, other, want in zip(mine, theirs, oracle, strict=True):
        assert got.dtype == dtype
        assert (got - want).norm() <= 1.5 * (other - want).norm() + 1e-3 * want.norm()


def test_loss_scaled_gradients_of_fp16_do_not_underflow() -> None:
    hidden, weight, targets, _ = operands(torch.float16)
    loss = tiled_cross_entropy(hidden * 1e-3, weight * 1e-4, targets)
    (found,) = torch.autograd.grad(loss * 2.0**14, [hidden])
    assert found.abs().max() > 0


def test_a_second_backward_of_a_kept_graph_gives_the_same() -> None:
    hidden, weight, targets, _ = operands()
    loss = tiled_cross_entropy(hidden, weight, targets) * 5
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_computes_the_logits_in_its_dtype() -> None:
    hidden, weight, targets, _ = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        mine, wanted = tiled_cross_entropy(hidden, weight, targets), plain(hidden, weight, targets, None, TiledLoss())
    torch.testing.assert_close(mine, wanted)
    assert all(each.dtype == torch.float32 for each in torch.autograd.grad(mine, [hidden, weight]))


def test_no_logits_of_all_tokens_are_made() -> None:
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    hidden, weight = torch.randn(512, WIDTH, requires_grad=True), torch.randn(1000, WIDTH, requires_grad=True)
    with Watch():
        tiled_cross_entropy(hidden, weight, torch.randint(1000, (512,)), loss=TiledLoss(rows=16)).backward()
    assert largest == 16 * 1000


def sliced_head(words: int, sequence_dim: int | None) -> None:
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(1)
    whole = nn.Linear(WIDTH, words, bias=True)
    hidden, targets = torch.randn(2, 4, WIDTH), torch.randint(words, (2, 4))
    loss = TiledLoss(label_smoothing=0.1, z_loss=0.01, rows=3)
    head = tiled_head(VocabularyHead.from_linear(whole, group, gather_output=False, sequence_dim=sequence_dim), loss=loss)
    part = hidden if sequence_dim is None else hidden.chunk(dist.get_world_size(), sequence_dim)[dist.get_rank()]
    mine, theirs = part.clone().requires_grad_(), hidden.clone().requires_grad_()
    got = head(mine, targets)
    want = plain(theirs, whole.weight, targets, whole.bias, loss)
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    assert theirs.grad is not None and whole.weight.grad is not None and head.weight.grad is not None
    wanted = theirs.grad if sequence_dim is None else theirs.grad.chunk(dist.get_world_size(), sequence_dim)[dist.get_rank()]
    torch.testing.assert_close(mine.grad, wanted)
    rows = stretch(words, dist.get_rank(), dist.get_world_size())
    torch.testing.assert_close(head.weight.grad[:len(rows)], whole.weight.grad[rows.start:rows.stop])


@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_a_head_with_sliced_words_gives_the_loss_of_the_whole(sequence_dim: int | None) -> None:
    run_ranks(2, sliced_head, WORDS, sequence_dim)


def test_a_tiled_head_keeps_parameters_hooks_and_mode() -> None:
    head, calls = nn.Linear(WIDTH, WORDS).eval(), []
    head.register_forward_hook(lambda *_: calls.append("called"))
    tiled = tiled_head(head)
    assert tiled.weight is head.weight and tiled.bias is head.bias and not tiled.training
    tiled(torch.randn(2, WIDTH), torch.tensor([1, 2]))
    tiled.register_forward_hook(lambda *_: calls.append("tiled"))
    head(torch.randn(2, WIDTH))
    assert calls == ["called", "called"]


class Language(nn.Module):
    """Tied embedding and head, with the loss in tiles or of whole logits."""

    def __init__(self, *, tiled: bool):
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        head = nn.Linear(WIDTH, WORDS, bias=False)
        head.weight = self.embed.weight
        self.head = tiled_head(head, loss=TiledLoss(rows=3)) if tiled else head

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.body:
            hidden = block(hidden)
        if isinstance(self.head, TiledHead):
            return self.head(hidden, targets)
        return F.cross_entropy(self.head(hidden).float().flatten(0, -2), targets.flatten())


def train(stage: int, dtype: str, tiled: bool) -> dict[str, Tensor]:
    model = Language(tiled=tiled)
    section = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    engine, *_ = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **section})
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(WORDS, (2, 6))
        engine.backward(engine(ids, ids.roll(-1, 1)))
        engine.step()
    with shoal.gathered([*model.parameters()]):
        return {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}


def stages_alike(dtype: str) -> None:
    wanted = train(0, dtype, tiled=False)
    for stage in (0, 3):
        found = train(stage, dtype, tiled=True)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5 if dtype == "fp32" else 2e-2,
                                       atol=1e-6 if dtype == "fp32" else 2e-2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_tied_head_trains_as_plain_at_stages_0_and_3(dtype: str) -> None:
    run_ranks(2, stages_alike, dtype)


def test_a_tiled_mlp_equals_the_module() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).double()
    tiled, x = TiledMLP(copy.deepcopy(mlp), rows=3), torch.randn(2, 7, 8, dtype=torch.float64)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(tiled(mine), mlp(theirs))
    tiled(mine).square().sum().backward()
    mlp(theirs).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    for a, b in zip(tiled.parameters(), mlp.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)  # of the sum over tiles


@pytest.mark.parametrize(("call", "words"), [
    (lambda: TiledLoss(reduction="max"), "reduction: got 'max'"),  # pyright: ignore[reportArgumentType]
    (lambda: TiledLoss(label_smoothing=2.0), "label_smoothing: got 2.0"),
    (lambda: TiledLoss(z_loss=-1.0), "z_loss: got -1.0"),
    (lambda: TiledLoss(rows=0), "rows: got 0"),
    (lambda: TiledLoss(recompute=False, reduction="none"), "beside reduction 'none'"),
    (lambda: tiled_cross_entropy(torch.randn(2, 3), torch.randn(5, 4), torch.zeros(2).long()), "they are"),
    (lambda: tiled_cross_entropy(torch.randn(2, 4), torch.randn(5, 4).half(), torch.zeros(2).long()), "one floating dtype"),
    (lambda: tiled_cross_entropy(torch.randn(2, 4), torch.randn(5, 4), torch.zeros(2)), "ids of words"),
    (lambda: tiled_cross_entropy(torch.randn(2, 4), torch.randn(5, 4), torch.tensor([1, 5])), "got target 5"),
    (lambda: tiled_head(nn.Embedding(2, 2)), "got a torch.nn.modules.sparse.Embedding"),
    (lambda: use_tiled_loss(nn.Linear(2, 2)), "is no language model"),
    (lambda: TiledMLP(nn.Linear(2, 2), rows=0), "rows: got 0"),
    (lambda: TiledMLP(nn.Linear(2, 2), rows=2.5), "rows: got 2.5"),  # pyright: ignore[reportArgumentType]
    (lambda: TiledMLP(nn.Linear(2, 2), rows=2)(torch.randn(2)), r"got an input \(2,\), which has no dim -2"),
    (lambda: TiledMLP(nn.LSTM(2, 2), rows=2)(torch.randn(4, 2)), "LSTM returned a tuple"),
])  # fmt: skip
def test_wrong_operands_are_refused(call: Callable[[], object], words: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match=words):
        call()


@pytest.mark.parametrize("recompute", [None, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_without_a_counted_target_gradients_are_zero_as_torchs(smoothing: float, recompute: bool | None) -> None:
    hidden, weight, targets, bias = operands()
    targets.fill_(-100)
    loss = TiledLoss(label_smoothing=smoothing, recompute=recompute)
    wanted = gradients(plain(hidden, weight, targets, bias, loss), (hidden, weight, bias))
    found = gradients(tiled_cross_entropy(hidden, weight, targets, bias, loss=loss), (hidden, weight, bias))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
def test_targets_of_any_integer_dtype_are_taken(dtype: torch.dtype) -> None:
    hidden, weight, targets, bias = operands()
    targets.clamp_(0)
    torch.testing.assert_close(tiled_cross_entropy(hidden, weight, targets.to(dtype), bias),
                               tiled_cross_entropy(hidden, weight, targets, bias))


class TestHuggingFace:
    """`use_tiled_loss` on causal models of transformers."""

    @staticmethod
    def model(**more: Any) -> Any:
        transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
        torch.manual_seed(0)
        kind = more.pop("kind", "Llama")
        sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                 "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
        return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes | more))

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("items", [None, 7])
    def test_loss_and_gradients_are_those_of_the_model(self, tied: bool, items: int | None) -> None:
        plain_model, mine = self.model(tie_word_embeddings=tied), self.model(tie_word_embeddings=tied)
        use_tiled_loss(mine, loss=TiledLoss(rows=3))
        assert mine.state_dict().keys() == plain_model.state_dict().keys()
        ids = torch.randint(WORDS, (2, 6))
        labels = ids.clone()
        labels[0, :3] = -100
        more = {} if items is None else {"num_items_in_batch": items}
        for model in (plain_model, copy.deepcopy(mine), mine):
            model.train()(input_ids=ids, labels=labels, **more).loss.backward()
        assert mine(input_ids=ids, labels=labels).logits is None
        assert mine(input_ids=ids, labels=labels, return_dict=False)[1] is None
        wanted = dict(plain_model.named_parameters())
        for name, parameter in mine.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad)

    def test_evaluation_and_calls_without_labels_have_logits(self) -> None:
        plain_model, mine = self.model(), self.model()
        use_tiled_loss(mine)
        ids = torch.randint(WORDS, (2, 6))
        torch.testing.assert_close(mine(input_ids=ids).logits, plain_model(input_ids=ids).logits)
        evaluated, wanted = mine.eval()(input_ids=ids, labels=ids), plain_model.eval()(input_ids=ids, labels=ids)
        torch.testing.assert_close(evaluated.loss, wanted.loss)
        torch.testing.assert_close(evaluated.logits, wanted.logits)

    def test_a_model_that_caps_its_logits_is_refused(self) -> None:
        model = self.model(kind="Gemma2", head_dim=8, final_logit_softcapping=5.0)
        use_tiled_loss(model)
        ids = torch.randint(WORDS, (2, 6))
        with pytest.raises(NotServed, match="changes its logits between the head and the loss"):
            model.train()(input_ids=ids, labels=ids)
        model.eval()(input_ids=ids, labels=ids)

    def test_a_model_that_computes_its_own_loss_is_refused(self) -> None:
        hf: Any = pytest.importorskip("transformers", reason="the package transformers is not installed")
        model: Any = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=WORDS, d_model=8, d_kv=4, d_ff=8, num_layers=1,
                                                               num_heads=2))
        with pytest.raises(NotServed, match="T5ForConditionalGeneration computes another loss in its forward"):
            use_tiled_loss(model)

        class Extends(hf.LlamaForCausalLM):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return super().forward(*args, **kwargs)

        use_tiled_loss(Extends(self.model().config))

    def test_a_head_that_is_replaced_afterwards_is_refused(self) -> None:
        model = self.model()
        use_tiled_loss(model)
        model.set_output_embeddings(nn.Linear(8, WORDS))
        ids = torch.randint(WORDS, (2, 6))
        with pytest.raises(UsageError, match="was replaced by a Linear afterwards"):
            model.train()(input_ids=ids, labels=ids)

    def test_a_second_swap_and_other_losses_are_refused(self) -> None:
        model = self.model()
        use_tiled_loss(model)
        with pytest.raises(UsageError, match="has a tiled head already"):
            use_tiled_loss(model)
        other = self.model()
        other.loss_function = F.cross_entropy
        with pytest.raises(NotServed, match="only that of causal language models"):
            use_tiled_loss(other)


class _Normalizes(nn.Module):
    """Drops by the named random state, and divides by a buffer that it updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("size", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with shoal.checkpointing.get_cuda_rng_tracker().fork():
            hidden = F.dropout(self.linear(x), 0.3)
        self.size.mul_(0.9).add_(hidden.detach().square().mean((0, 1)), alpha=0.1)
        return hidden / self.size.clone()


def test_a_tile_is_recomputed_with_the_states_and_buffers_of_its_forward() -> None:
    found: list[list[Tensor]] = []
    for tiled in (False, True):
        torch.manual_seed(0)
        shoal.checkpointing.model_parallel_cuda_manual_seed(7)
        module = _Normalizes()
        x = torch.randn(1, 6, WIDTH)
        parts = [TiledMLP(module, rows=3)(x)] if tiled else [module(part) for part in x.split(3, 1)]
        torch.cat(parts, 1).square().sum().backward()
        found.append([module.size, *(parameter.grad for parameter in module.parameters() if parameter.grad is not None)])
    assert all(map(torch.equal, *found))
