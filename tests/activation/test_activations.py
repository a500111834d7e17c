"""Recomputed blocks and saved tensors that rest elsewhere train bit by bit as those that stay."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.activation import SavedActivations
from shoal.activation.recompute import is_kept
from shoal.activation.saved import version_witness
from shoal.errors import ConfigError, TierError, UsageError
from shoal.tensor_parallel import Column, Plan, Row, parallelize
from shoal.testing import ranks_on, run_ranks
from shoal.tier import Disk, Swap, store
from tests.late.ranks import prepare

WIDTH, ROWS, BLOCKS, STEPS = 32, 600, 3, 2
BYTES = ROWS * WIDTH * 4
"""Of the input of a block."""


class Block(nn.Module):
    """A block with dropout, a product that is saved by two nodes, and a view that is saved with its strides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.up(self.norm(x)).chunk(2, dim=-1)
        return x + self.drop(self.down(torch.nn.functional.silu(left) * right))


class UserRecompute(nn.Module):
    """A block that a script recomputes itself."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self._reentrant)
        return x


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "blocks":
        return nn.Sequential(*[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 8))
    return UserRecompute(reentrant=kind == "reentrant")


def _engine(model: nn.Module, section: dict[str, Any], stage: int = 0, accumulation: int = 1, **more: Any) -> Any:
    return shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {
            "stage": stage, "stage3_param_persistence_threshold": 0}, "activation_checkpointing": section, **more})[0]


def _train(kind: str, section: dict[str, Any], stage: int, accumulation: int) -> tuple[list[float], list[Tensor], int]:
    model = _model(kind)
    engine = _engine(model, section, stage, accumulation)
    torch.manual_seed(5)
    losses: list[float] = []
    for _ in range(STEPS * accumulation):
        x = torch.randn(ROWS, WIDTH).to(engine.device).requires_grad_()
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    rested = engine.activations.rested_bytes if engine.activations is not None else 0
    engine.destroy()
    return losses, [parameter.detach().cpu().clone() for parameter in model.parameters()], rested


def _same(ranks: int, kind: str, section: dict[str, Any], stage: int, accumulation: int) -> int:
    """Train with the section and without it; return the bytes that rested on rank 0."""
    plain, ours = (run_ranks(ranks, _train, kind, each, stage, accumulation) for each in ({}, section))
    for (losses, weights, _), (expected, expected_weights, _) in zip(ours, plain, strict=True):
        assert losses == expected
        assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))
    return ours[0][2]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_recompute_and_rest_on_disk_change_no_bit(stage: int, recompute: str, tmp_path: Path) -> None:
    accumulation = 1 + (stage + len(recompute)) % 2
    section = {"recompute": recompute, "rest": "nvme", "nvme_path": str(tmp_path)}
    assert _same(2, "blocks", section, stage, accumulation) > 0
    if recompute != "none":
        assert _same(1, "blocks", {"recompute": recompute}, stage, accumulation) == 0


def test_full_recompute_rests_the_inputs_of_blocks_alone(tmp_path: Path) -> None:
    rested = _same(1, "blocks", {"recompute": "full", "rest": "nvme", "nvme_path": str(tmp_path)}, 0, 1)
    assert rested == STEPS * (BLOCKS + 1) * BYTES  # of the blocks, and of the layer behind them


@pytest.mark.parametrize("kind", ["reentrant", "functional"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_inputs_of_a_scripts_own_recompute_rest(stage: int, kind: str, tmp_path: Path) -> None:
    accumulation = 1 + (stage + len(kind)) % 2
    rested = _same(2, kind, {"rest": "nvme", "nvme_path": str(tmp_path)}, stage, accumulation)
    assert rested >= STEPS * accumulation * BLOCKS * BYTES


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("section", [{}, {"recompute": "full"}, {"budget": "2MB"}], ids=str)
def test_host_rest_is_bitwise_on_a_device_that_is_behind(section: dict[str, Any], stage: int) -> None:
    with ranks_on(prepare):
        assert _same(1, "blocks", {**section, "cpu_checkpointing": True}, stage, 1) > 0


def test_each_storage_rests_once_however_many_nodes_save_it(tmp_path: Path) -> None:
    saved, found = _saved(tmp_path), []
    x = torch.randn(400, 64)
    views = [saved.pack(each, "module") for each in (x, x.t(), x[1:, ::2])]
    for view, each in zip(views, (x, x.t(), x[1:, ::2]), strict=True):
        assert view is not None
        found.append(view.restore())
        assert torch.equal(found[-1], each) and found[-1].stride() == each.stride()
    assert saved.rested_bytes == x.numel() * 4


def test_a_shared_storage_does_not_fetch_the_module_that_saved_it_first(tmp_path: Path) -> None:
    saved, shared, fetched = _saved(tmp_path), torch.randn(200, 200), list[str]()
    names = ["block 0", "block 1", "block 2"]
    views = {name: (saved.pack(torch.randn(300, 300), name), saved.pack(shared, name)) for name in names}
    for name, (own, _) in views.items():
        assert own is not None
        fetch = own.storage.fetch
        own.storage.fetch = lambda name=name, fetch=fetch: (fetched.append(name), fetch())[1]  # type: ignore[method-assign]
    last = views["block 2"][1]
    assert last is not None and torch.equal(last.restore(), shared)
    assert set(fetched) == {"block 2", "block 1"}


def test_a_later_value_of_a_storage_rests_apart(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    x = torch.zeros(400, 64)
    before = saved.pack(x, "module")
    x.add_(1)
    after = saved.pack(x, "module")
    assert before is not None and after is not None
    assert before.restore().sum() == 0 and after.restore().sum() == x.numel()


def test_a_part_with_versions_of_its_own_rests_alone(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    first, second = torch.zeros(400, 128).unsafe_chunk(2, -1)
    first.add_(1)
    resting = [saved.pack(first, "module")]
    second.add_(2)  # has the version that the first had
    resting += [saved.pack(second, "module"), saved.pack(second[1:, ::2], "module")]
    found = [view.restore() for view in resting if view is not None]
    assert saved.rested_bytes == 2 * first.numel() * 4
    for view, each in zip(found, (first, second, second[1:, ::2]), strict=True):
        assert torch.equal(view, each) and view.stride() == each.stride()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_small_whole_number_and_sparse_tensors_stay(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    for tensor in (torch.zeros(10), torch.zeros(40_000, dtype=torch.int64), torch.eye(300).to_sparse(),
                   torch._efficientzerotensor(40_000), torch.nested.nested_tensor([torch.ones(40_000)]),
                   torch.zeros(40_000, device="meta")):
        assert saved.pack(tensor, "module") is None


def test_a_memory_that_is_used_again_is_another_storage(tmp_path: Path) -> None:
    saved = _saved(tmp_path)
    views = []
    for value in range(20):
        view = saved.pack(torch.full((200, 200), float(value)), "module")  # freed at once: its memory serves the next
        views.append(view)
    assert [view.restore()[0, 0].item() for view in views if view is not None] == list(range(20))


def test_spans_serve_the_next_step(tmp_path: Path) -> None:
    swap = Swap(tmp_path)
    saved = _saved_on(swap)
    for _ in range(5):
        view = saved.pack(torch.ones(200, 200), "module")
        del view
        gc.collect()
    assert swap.disk_bytes == -(-200 * 200 * 4 // 4096) * 4096


def test_a_witness_counts_the_writes_to_its_tensor() -> None:
    x = torch.zeros(8)
    witness = version_witness(x)
    assert witness.untyped_storage().nbytes() == 0 and witness._version == x._version
    x[2:].add_(1)
    assert witness._version == x._version > 0


@pytest.mark.parametrize("rest", ["device", "nvme"])
def test_writes_to_saved_tensors_raise_as_in_plain_pytorch(rest: str, tmp_path: Path) -> None:
    engine = run_ranks(1, _written, {"rest": rest, "nvme_path": str(tmp_path)})
    assert engine[0] == ("RuntimeError" if rest == "device" else "UsageError")


def _written(section: dict[str, Any]) -> str:
    class Writes(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x).exp()
            loss = hidden.square()
            hidden.mul_(2)
            return loss

    engine = _engine(nn.Sequential(Writes()), section)
    loss = engine(torch.randn(ROWS, WIDTH)).mean()
    try:
        engine.backward(loss)
    except RuntimeError as error:
        return type(error).__name__
    return ""


def test_forwards_without_backward_keep_nothing(tmp_path: Path) -> None:
    assert run_ranks(1, _evaluated, str(tmp_path)) == [(0, True)]


def _evaluated(folder: str) -> tuple[int, bool]:
    engine = _engine(_model("blocks"), {"recompute": "full", "rest": "nvme", "nvme_path": folder})
    with torch.no_grad():
        engine(torch.randn(ROWS, WIDTH))
    in_evaluation = engine.activations.rested_bytes
    engine(torch.randn(ROWS, WIDTH))  # its graph is dropped
    gc.collect()
    spans = engine.activations._spans
    free = sum(span.tensor.numel() for each in spans._free.values() for span in each)
    engine.destroy()
    return in_evaluation, free == (BLOCKS + 1) * BYTES


def test_a_destroyed_engine_leaves_a_plain_model() -> None:
    assert run_ranks(1, _destroyed) == [True]


def _destroyed() -> bool:
    model = _model("blocks")
    engine = _engine(model, {"recompute": "full"})
    engine.destroy()
    calls: list[int] = []
    first = model.get_submodule("0.up")
    first.register_forward_hook(lambda module, args, output: calls.append(1))
    model(torch.randn(4, WIDTH)).sum().backward()
    once = len(calls) == 1
    _engine(model, {"recompute": "full"})(torch.randn(4, WIDTH)).sum().backward()
    return once and len(calls) == 3  # run twice where it is recomputed again


def test_backward_twice_restores_twice(tmp_path: Path) -> None:
    assert run_ranks(1, _retained, str(tmp_path)) == [True]


def _retained(folder: str) -> bool:
    engine = _engine(_model("blocks"), {"rest": "nvme", "nvme_path": folder})
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    loss = engine(x).square().mean()
    first, = torch.autograd.grad(loss, x, retain_graph=True)
    second, = torch.autograd.grad(loss, x)
    return torch.equal(first, second)


def test_a_model_without_blocks_says_what_to_do() -> None:
    with pytest.raises(AssertionError, match=r"activation_checkpointing.recompute: got 'full'; the Linear has no repeated"):
        run_ranks(1, _no_blocks)


def _no_blocks() -> None:
    _engine(nn.Linear(4, 4), {"recompute": "full"})


@pytest.mark.parametrize(("section", "message"), [
    ({"rest": "nvme"}, "got 'nvme' without nvme_path"),
    ({"rest": "nvme", "nvme_path": "x", "cpu_checkpointing": True}, "saved tensors rest in one place"),
    ({"rest": "tape"}, "device"),
    ({"recompute": "some"}, "selective"),
])
def test_bad_sections_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shoal.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, "activation_checkpointing": section})


def test_a_layer_whose_saved_noise_torch_fills_later_may_not_rest(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.RReLU())
    with pytest.raises(ConfigError, match=r"rest: got 'nvme'; the layer '1' is an nn\.RReLU"):
        _engine(model, {"rest": "nvme", "nvme_path": str(tmp_path)})


def test_a_damaged_file_is_an_error_of_backward(tmp_path: Path) -> None:
    swap = Swap(tmp_path)
    view = _saved_on(swap).pack(torch.randn(400, 64), "module")
    assert view is not None
    with swap.write_ended:
        swap.write_ended.wait_for(lambda: not swap.writing_bytes)
    with open(swap.path, "r+b") as file:
        file.write(b"damage")
    with pytest.raises(TierError, match="checksum"):
        view.restore()


def test_selective_recompute_runs_attention_with_dropout_again() -> None:
    func, (q, k, v) = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ones(3, 1, 1, 2, 2)
    assert is_kept(func, (q, k, v), {})
    assert is_kept(func, (q, k, v, 0.0), {"is_causal": True})
    assert not is_kept(func, (q, k, v, 0.1), {})
    assert not is_kept(func, (q, k, v), {"dropout_p": 0.1})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds the saved tensors of less than one step."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "shoal-test", folder], capture_output=True,
                      check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_names_rank_and_unit_and_loses_nothing(small_disk: Path) -> None:
    model, plain = _model("blocks"), _model("blocks")
    engine = _engine(model, {"rest": "nvme", "nvme_path": str(small_disk)})
    reference = _engine(plain, {})
    x = torch.randn(ROWS, WIDTH)
    with pytest.raises(TierError, match=r"(?s)rank 0: saved activations of .* No space left on device: needed .* bytes, .* "
                                        r"saved in the forward around unit '[012]'"):
        engine(x)
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    for each in (engine, reference):
        torch.manual_seed(3)
        for _ in range(STEPS):
            each.backward(each(x).square().mean())
            each.step()
    assert engine.activations.rested_bytes > 1 << 20
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    for each in (engine, reference):
        each.destroy()


def _full_host() -> tuple[str, bool]:
    """Return the error of a step without host memory, and whether training goes on bit by bit."""
    model, plain = _model("blocks"), _model("blocks")
    engine, reference = _engine(model, {"cpu_checkpointing": True}), _engine(plain, {})
    allocate, message = (store.zeros, store.pinned_zeros), ""

    def fails(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        raise RuntimeError("can't allocate memory")

    x = torch.randn(ROWS, WIDTH).to(engine.device)
    store.zeros = store.pinned_zeros = fails
    try:
        engine(x)
    except TierError as error:
        message = str(error)
    store.zeros, store.pinned_zeros = allocate
    for each in (engine, reference):
        torch.manual_seed(3)
        for _ in range(STEPS):
            each.backward(each(x).square().mean())
            each.step()
    return message, all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_full_host_names_rank_and_unit_and_loses_nothing() -> None:
    with ranks_on(prepare):
        (message, same), = run_ranks(1, _full_host)
    assert re.match(r"rank 0: saved activations of .* bytes: needed .* bytes of .*host memory: can't allocate memory\. "
                    r"It is a tensor of shape .*, saved in the forward around unit '[012]'", message)
    assert same


def _saved(folder: Path) -> SavedActivations:
    return _saved_on(Swap(folder))


def _saved_on(swap: Swap) -> SavedActivations:
    return SavedActivations(Disk(swap=swap), torch.device("cpu"))


def test_errors_name_the_tensor_and_the_unit(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"shape \(600, 128\) and torch.float32, saved in the forward around unit"):
        run_ranks(1, _raise_written, {"rest": "nvme", "nvme_path": str(tmp_path)})


def _raise_written(section: dict[str, Any]) -> None:
    class Writes(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x).exp()
            loss = hidden.square()
            hidden.mul_(2)
            return loss

    engine = _engine(nn.Sequential(Writes()), section)
    try:
        engine.backward(engine(torch.randn(ROWS, WIDTH)).mean())
    except UsageError as error:
        raise AssertionError(str(error)) from None


def _sliced_model() -> nn.Module:
    assert dist.group.WORLD is not None
    return parallelize(_model("blocks"), dist.group.WORLD, Plan({"*.up": Column(), "*.down": Row()}))


def _tensor_parallel(section: dict[str, Any], stage: int) -> tuple[list[float], list[Tensor], int]:
    model = _sliced_model()
    engine = _engine(model, section, stage, mesh={"tensor": 2})
    losses: list[float] = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = engine(torch.randn(ROWS, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    rested = engine.activations.rested_bytes if engine.activations is not None else 0
    engine.destroy()
    return losses, [parameter.detach().clone() for parameter in model.parameters()], rested


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_tensor_ranks_keep_one_slice_each_of_the_inputs_of_blocks(stage: int, disk: bool, tmp_path: Path) -> None:
    section: dict[str, Any] = {"recompute": "full", "partition_activations": True}
    if disk:
        section |= {"rest": "nvme", "nvme_path": str(tmp_path)}
    plain, ours = (run_ranks(2, _tensor_parallel, each, stage) for each in ({}, section))
    for (losses, weights, rested), (expected, expected_weights, _) in zip(ours, plain, strict=True):
        assert losses == expected
        assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))
        assert rested == STEPS * (BLOCKS * BYTES // 2 + (BYTES if disk else 0))  # the last layer's input is no block's


def test_inputs_that_differ_between_tensor_ranks_are_not_sliced() -> None:
    with pytest.raises(AssertionError, match=r"partition_activations: got true; rank \d: the tensor ranks give different"):
        run_ranks(2, _different_inputs)


def _different_inputs() -> None:
    class AddsRank(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + dist.get_rank()

    model = nn.Sequential(AddsRank(), _sliced_model())
    engine = _engine(model, {"recompute": "full", "partition_activations": True}, mesh={"tensor": 2})
    torch.manual_seed(0)
    engine(torch.randn(ROWS, WIDTH))


def _decoder(kind: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                                  num_attention_heads=4, num_key_value_heads=2))
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64))
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4,
                                                     decoder_start_token_id=0))


def _train_decoder(kind: str, section: dict[str, Any]) -> list[Tensor]:
    """Return the weights after a step without padding and one with it, and the length of the cache of an evaluation."""
    model = _decoder(kind).train()
    engine = _engine(model, section)
    ids, mask = torch.randint(64, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    for kept in (24, 18):
        mask[0, kept:] = 0
        engine.backward(engine(input_ids=ids, labels=ids, attention_mask=mask).loss)
        engine.step()
    model.eval()
    cache = engine(input_ids=ids, labels=ids, attention_mask=mask).past_key_values
    engine.destroy()
    return [*(parameter.detach().clone() for parameter in model.parameters()), torch.tensor(cache.get_seq_length())]


@pytest.mark.parametrize("section", [{"recompute": "full"}, {"recompute": "selective"}, {"budget": "1GB"}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
def test_a_cache_that_training_fills_does_not_disturb_recompute(kind: str, section: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    kept, found = run_ranks(1, _train_decoder, kind, {})[0], run_ranks(1, _train_decoder, kind, section)[0]
    assert all(map(torch.equal, kept, found))


def _twice(recompute: str) -> bool:
    engine = _engine(_model("blocks"), {"recompute": recompute})
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    loss = engine(x).square().mean()
    first, = torch.autograd.grad(loss, x, retain_graph=True)
    second, = torch.autograd.grad(loss, x)
    return torch.equal(first, second)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_second_backward_of_recomputed_blocks_gives_the_same(recompute: str) -> None:
    assert run_ranks(1, _twice, recompute) == [True]


def test_a_copy_of_a_model_that_recomputes_keeps_its_activations() -> None:
    assert run_ranks(1, _copied) == [1]


def _copied() -> int:
    model = _model("blocks")
    engine = _engine(model, {"recompute": "full"})
    twin, calls = copy.deepcopy(model), list[int]()
    engine.destroy()
    twin.get_submodule("0.up").register_forward_hook(lambda module, args, output: calls.append(1))
    twin(torch.randn(4, WIDTH)).sum().backward()
    return len(calls)


def _stack_of_our_layers(stage: int) -> int:
    config = shoal.nn.TransformerConfig(hidden_size=WIDTH, heads=4, num_hidden_layers=BLOCKS)
    model = nn.Sequential(*[shoal.nn.TransformerLayer(config) for _ in range(BLOCKS)], nn.Linear(WIDTH, 8), nn.Linear(8, 8))
    engine = _engine(model, {"recompute": "full"}, stage)
    engine.backward(engine(torch.randn(2, 5, WIDTH)).sum())
    return len(engine.recomputed)


@pytest.mark.parametrize("stage", [0, 3])
def test_transformer_layers_in_a_list_are_blocks_to_recompute(stage: int) -> None:
    assert run_ranks(1, _stack_of_our_layers, stage) == [BLOCKS]


def _lengths(folder: str, lengths: list[int]) -> list[int]:
    """Return the bytes on disk after a step of each length."""
    engine = _engine(_model("blocks"), {"rest": "nvme", "nvme_path": folder})
    found: list[int] = []
    for rows in lengths:
        engine.backward(engine(torch.randn(rows, WIDTH)).square().mean())
        engine.step()
        found.append(engine.activations._spans._store.swap.disk_bytes)
    engine.destroy()
    return found


@pytest.mark.parametrize("step", [1, -1])
def test_inputs_of_other_lengths_do_not_fill_the_store(step: int, tmp_path: Path) -> None:
    found = run_ranks(1, _lengths, str(tmp_path), list(range(ROWS, ROWS + 200, 10))[::step])[0]
    of_longest = found[0] if step < 0 else run_ranks(1, _lengths, str(tmp_path), [ROWS + 190])[0][0]
    assert max(found) <= 1.2 * of_longest
