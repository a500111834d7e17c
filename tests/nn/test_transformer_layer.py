"""The transformer layer is the layer of BERT and of GPT-2, with any options, and saves what its table says."""

from __future__ import annotations

import copy
import itertools
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.errors import ConfigError, NotServed, UsageError
from shoal.nn import (
    TransformerConfig,
    TransformerLayer,
    inject_transformer_layers,
    passes,
    restore_transformer_layers,
)
from shoal.testing import run_ranks

HIDDEN, HEADS, LENGTH = 32, 4, 24
"""A length that is no multiple of attention's blocks."""


def layer(**more: Any) -> TransformerLayer:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "heads": HEADS, "num_hidden_layers": 2, "initializer_range": 0.2,
                             "layer_norm_eps": 1e-5}
    made = TransformerLayer(TransformerConfig(**sizes | more))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def oracle(made: TransformerLayer, x: Tensor, mask: Tensor | None) -> Tensor:
    """The layer by torch's operations alone."""
    def norm(h: Tensor, gain: str, shift: str) -> Tensor:
        return F.layer_norm(h, (HIDDEN,), made.get_parameter(gain), made.get_parameter(shift), made.config.layer_norm_eps)

    def attention(h: Tensor) -> Tensor:
        qkv = F.linear(h, made.get_parameter("attn_qkvw"), made.get_parameter("attn_qkvb"))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2)
        return F.linear(context, made.get_parameter("attn_ow"), made.get_parameter("attn_ob"))

    def mlp(h: Tensor) -> Tensor:
        wide = F.gelu(F.linear(h, made.get_parameter("inter_w"), made.get_parameter("inter_b")))
        return F.linear(wide, made.get_parameter("output_w"), made.get_parameter("output_b"))

    if made.config.pre_layer_norm:
        a = x + attention(norm(x, "attn_nw", "attn_nb"))
        return a + mlp(norm(a, "norm_w", "norm_b"))
    a = norm(x + attention(x), "attn_nw", "attn_nb")
    return norm(a + mlp(a), "norm_w", "norm_b")


@pytest.mark.parametrize(("pre", "invertible", "gelu"), [*itertools.product((True, False), repeat=3)])
def test_outputs_and_gradients_are_those_of_torch(pre: bool, invertible: bool, gelu: bool) -> None:
    made = layer(pre_layer_norm=pre, normalize_invertible=invertible, gelu_checkpoint=gelu, attn_dropout_checkpoint=True,
                 stochastic_mode=True)
    x = torch.randn(2, LENGTH, HIDDEN)
    hidden = torch.zeros(2, 1, 1, LENGTH)
    hidden[0, :, :, 17:] = -1e4
    for mask in (None, hidden):
        outcomes: list[list[Tensor]] = []
        for compute in (made, partial(oracle, made)):
            y = compute(leaf := x.clone().requires_grad_(), mask)
            outcomes.append([y, *torch.autograd.grad((y * x.cos()).sum(), [leaf, *made.parameters()])])
        for got, want in zip(*outcomes, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pre", [True, False])
def test_a_layer_in_fp64_passes_the_check_of_gradients(pre: bool) -> None:
    made = layer(pre_layer_norm=pre, normalize_invertible=True, gelu_checkpoint=True).double()
    x = torch.randn(1, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(made, (x,), fast_mode=True)


def test_a_bool_mask_of_keys_hides_as_an_added_one() -> None:
    made, x = layer(), torch.randn(2, LENGTH, HIDDEN)
    seen = torch.ones(2, LENGTH, dtype=torch.bool)
    seen[0, 17:] = False
    added = torch.zeros(2, 1, 1, LENGTH).masked_fill(~seen[:, None, None], -1e9)
    torch.testing.assert_close(made(x, seen), made(x, added))


def test_dropout_does_not_depend_on_the_default_device() -> None:
    made, x = layer(attn_dropout_ratio=0.1, hidden_dropout_ratio=0.2), torch.randn(2, 8, HIDDEN)
    torch.manual_seed(0)
    expected = made(x)
    torch.manual_seed(0)
    with torch.device("meta"):
        assert torch.equal(made(x), expected)


def test_dropout_is_recomputed_alike_and_keeps_the_mean() -> None:
    made = layer(attn_dropout_ratio=0.1, hidden_dropout_ratio=0.2, seed=7)
    x = torch.randn(2, LENGTH, HIDDEN, requires_grad=True)
    outcomes: list[Tensor] = []
    for call in (made, partial(checkpoint, made, use_reentrant=False)):
        torch.manual_seed(3)
        y = call(x)
        outcomes += [y, *torch.autograd.grad(y.square().sum(), [x, made.get_parameter("inter_w")])]
    for a, b in zip(outcomes[:3], outcomes[3:], strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(made(x), made(x))
    made.eval()
    assert torch.equal(made(x), made(x))
    many = torch.ones(300, 500)
    assert abs(float(passes.drop(many, None, 0.2, 5).mean()) - 1) < 0.01


@pytest.mark.parametrize("residual", [True, False])
def test_native_dropout_is_the_torch_one_bit_for_bit(residual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 37, 45)
    base = torch.randn_like(x) if residual else None
    native = passes.drop(x, base, 0.3, 2**61 - 3)
    monkeypatch.setattr(passes.native, "available", lambda: False)
    assert torch.equal(native, passes.drop(x, base, 0.3, 2**61 - 3))


def saved_bytes(made: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that autograd holds until backward, parameters apart."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in made.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = made(x)
    assert output.requires_grad
    return sum(found.values())


@pytest.mark.parametrize(("pre", "invertible", "gelu", "units"), [
    (False, True, True, 11), (False, False, True, 12), (False, True, False, 15), (True, True, True, 10),
    (True, False, True, 12)])  # fmt: skip
def test_the_layer_saves_what_its_table_says(pre: bool, invertible: bool, gelu: bool, units: int) -> None:
    made = layer(pre_layer_norm=pre, normalize_invertible=invertible, gelu_checkpoint=gelu, attn_dropout_ratio=0.1,
                 hidden_dropout_ratio=0.1, heads=2)  # heads of 16, which attention does not pad
    x = torch.randn(4, 64, HIDDEN, requires_grad=True)
    sums = 4 * 4 * 64 * (HEADS + 2 + 2)  # the log-sum-exp of each head's rows, and means and rates of the norms
    unit = x.numel() * 4
    assert units * unit <= saved_bytes(made, x) <= units * unit + sums


def test_initial_values_are_copied_and_drawn_as_published(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "heads": 4, "num_hidden_layers": 8, "initializer_range": 0.1}
    (tmp_path / "layer.json").write_text(json.dumps(sizes))
    made = TransformerLayer(TransformerConfig.from_json_file(tmp_path / "layer.json"))
    assert made.get_parameter("inter_w").std().item() == pytest.approx(0.1, rel=0.05)
    assert made.get_parameter("output_w").std().item() == pytest.approx(0.1 / math.sqrt(16), rel=0.05)
    shapes = [(64, 64)] * 4 + [(64,), (256, 64), (64, 256), (64,)]
    weights, biases = [torch.randn(shape) for shape in shapes], [torch.randn(shape[0]) for shape in shapes]
    taken = TransformerLayer(TransformerConfig(**sizes), weights, biases)
    assert torch.equal(taken.get_parameter("attn_qkvw"), torch.cat(weights[:3]))
    assert torch.equal(taken.get_parameter("output_b"), biases[6])
    with pytest.raises(UsageError, match="give those of query, key, value and then of attn_ow"):
        TransformerLayer(TransformerConfig(**sizes), weights[:7])


@pytest.mark.parametrize(("change", "words"), [
    ({"hidden_size": -1}, "hidden_size: got -1"), ({"heads": 5}, "heads: got 5; give a divisor of hidden_size"),
    ({"attn_dropout_ratio": 1.0}, "attn_dropout_ratio: got 1.0"), ({"num_hidden_layers": -1}, "num_hidden_layers: got -1"),
    ({"initializer_range": 0.0}, "initializer_range: got 0.0"), ({"intermediate_size": 0}, "intermediate_size: got 0"),
    ({"layer_norm_eps": -1}, "layer_norm_eps: got -1; give a number of at least 0"),
    ({"layer_norm_eps": float("nan")}, "layer_norm_eps: got nan"), ({"seed": "a"}, "seed: got 'a'; give a whole number"),
    ({"hidden_size": "32"}, "hidden_size: got '32'; give a whole number"),
    ({"attn_dropout_ratio": None}, "attn_dropout_ratio: got None; give a number"),
    ({"fp16": "no"}, "fp16: got 'no'; give true or false"),
])  # fmt: skip
def test_a_wrong_configuration_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layer(**change)
    with pytest.raises(ConfigError, match="unknown keys hiden"):
        TransformerConfig.from_dict({"hiden": 1})


def test_under_the_published_name_other_keys_warn(caplog: pytest.LogCaptureFixture) -> None:
    from shoal.compat.deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

    with caplog.at_level("WARNING", logger="shoal"):
        config = DeepSpeedTransformerConfig.from_dict({"hidden_size": HIDDEN, "heads": HEADS, "num_hidden_layers": 1,
                                                       "hiden": 1})
    assert "DeepSpeedTransformerConfig: unknown keys hiden" in caplog.text and vars(config)["hiden"] == 1
    assert DeepSpeedTransformerLayer(config).config.hidden_size == HIDDEN


def test_an_invertible_norm_with_a_gain_near_zero_is_refused_by_name() -> None:
    made = layer(normalize_invertible=True)
    with torch.no_grad():
        made.get_parameter("norm_w")[5] = 1e-6
    with pytest.raises(UsageError, match=rf"TransformerLayer {made.number}: norm_w\[5\] is 1e-06"):
        made(torch.randn(1, 16, HIDDEN))
    made.eval()(torch.randn(1, 16, HIDDEN))
    with pytest.raises(UsageError, match="got hidden states"):
        made(torch.randn(16, HIDDEN))


def hugging_face(kind: str, dropout: float = 0.0, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")
    torch.manual_seed(0)
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(
            vocab_size=50, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **more))
    return transformers.GPT2Model(transformers.GPT2Config(
        vocab_size=50, n_embd=HIDDEN, n_layer=2, n_head=HEADS, attn_pdrop=dropout, resid_pdrop=dropout,
        embd_pdrop=dropout, **more))


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_injected_models_compute_as_before(kind: str) -> None:
    plain = hugging_face(kind).train()
    mine = copy.deepcopy(plain)
    assert inject_transformer_layers(mine) == 2
    assert mine.state_dict().keys() == plain.state_dict().keys()
    ids, padding = torch.randint(50, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.long)
    padding[0, 20:] = 0
    for mask in (None, padding):
        for model in (plain, mine):
            model.zero_grad()
            output = model(input_ids=ids, attention_mask=mask).last_hidden_state
            (output * padding[..., None] * torch.linspace(-1, 1, HIDDEN)).sum().backward()
        for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
    assert restore_transformer_layers(mine) == 2
    assert torch.equal(mine(input_ids=ids).last_hidden_state, plain(input_ids=ids).last_hidden_state)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_injected_models_refuse_a_gradient_penalty_until_restored(kind: str) -> None:
    plain = hugging_face(kind, attn_implementation="eager").train()
    mine = copy.deepcopy(plain)
    inject_transformer_layers(mine, normalize_invertible=False)
    ids, gradients = torch.randint(50, (1, 8)), list[list[Tensor]]()
    for model in (mine, plain, mine):
        weights = [*model.get_input_embeddings().parameters()]
        loss = model(input_ids=ids).last_hidden_state.pow(3).mean()
        if not gradients and model is mine:
            with pytest.raises(NotServed, match=r"has no second derivative, .* call restore_transformer_layers\(model\)"):
                torch.autograd.grad(loss, weights, create_graph=True)
            restore_transformer_layers(mine)
            continue
        penalty = torch.stack([each.square().sum() for each in torch.autograd.grad(loss, weights, create_graph=True)]).sum()
        gradients.append([*torch.autograd.grad(penalty, weights)])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("change", ["eval mode", "other class", "one alone"])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_dropouts_that_a_script_changed_are_those_of_the_model(kind: str, change: str) -> None:
    plain = hugging_face(kind).train()
    for name, module in [*plain.named_modules()]:
        if not isinstance(module, nn.Dropout) or name.endswith(("self.dropout", "attn_dropout")):
            continue
        if change == "other class":
            plain.set_submodule(name, nn.Identity())
        elif change == "eval mode":
            module.eval().p = 0.5
        elif name.endswith(("attention.output.dropout", "resid_dropout")):
            module.p = 0.5
    mine = copy.deepcopy(plain)
    inject_transformer_layers(mine)
    ids, outputs = torch.randint(50, (2, LENGTH)), list[Tensor]()
    for model in (plain, mine):
        torch.manual_seed(1)
        outputs.append(model(input_ids=ids).last_hidden_state)
    torch.testing.assert_close(*outputs)


def test_generation_over_a_cache_is_the_models_own() -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=50, n_embd=HIDDEN, n_layer=2, n_head=HEADS)).eval()
    mine = copy.deepcopy(plain)
    inject_transformer_layers(mine)
    ids = torch.randint(50, (1, 5))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(mine.generate(ids, **options), plain.generate(ids, **options))


def test_models_that_cannot_be_injected_are_refused() -> None:
    with pytest.raises(UsageError, match="has no BertLayer and no GPT2Block"):
        inject_transformer_layers(nn.Linear(2, 2))
    with pytest.raises(NotServed, match="the activation of BertLayer is 'relu'"):
        inject_transformer_layers(hugging_face("bert", hidden_act="relu"))
    model = hugging_face("bert").train()
    inject_transformer_layers(model)
    with torch.no_grad():
        model.encoder.layer[0].output.LayerNorm.weight[3] = 0
    with pytest.raises(UsageError, match=r"BertLayer.output.LayerNorm.weight\[3\] is 0"):
        model(input_ids=torch.randint(50, (1, 8)))


def trained(stage: int, *, injected: bool, dtype: str) -> Tensor:
    model = hugging_face("bert")
    if injected:
        inject_transformer_layers(model)
    section = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    engine, *_ = shoal.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, **section,
        "activation_checkpointing": {"recompute": "full" if stage == 3 else "none"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    for step in range(2):
        torch.manual_seed(10 * step + dist.get_rank())
        output = engine(input_ids=torch.randint(50, (2, LENGTH)))
        engine.backward(output.last_hidden_state.float().square().mean() + output.pooler_output.float().mean())
        engine.step()
    with shoal.gathered([*model.parameters()]):
        return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def stages_alike() -> None:
    wanted = trained(0, injected=False, dtype="fp32")
    for stage in (0, 3):
        torch.testing.assert_close(trained(stage, injected=True, dtype="fp32"), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trained(3, injected=True, dtype="bf16"), wanted, rtol=5e-2, atol=5e-2)


def test_an_injected_model_trains_as_plain_at_stages_0_and_3() -> None:
    run_ranks(2, stages_alike)


def test_the_published_names_build_and_replace_layers() -> None:
    from shoal.compat.deepspeed.module_inject import replace_transformer_layer, revert_transformer_layer
    from shoal.compat.deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

    config = DeepSpeedTransformerConfig(8, HIDDEN, -1, HEADS, num_hidden_layers=2, return_tuple=True, initializer_range=0.02)
    (output,) = DeepSpeedTransformerLayer(config)(torch.randn(1, 16, HIDDEN))
    assert output.shape == (1, 16, HIDDEN)
    model = hugging_face("bert")
    layers = [*model.encoder.layer]
    assert replace_transformer_layer(type(layers[0]), model, micro_batch_size=8, preln=False, training=True) is model
    assert all("forward" in vars(each) for each in layers)
    revert_transformer_layer(type(layers[0]), model)
    assert not any("forward" in vars(each) for each in layers)
    with pytest.raises(NotImplementedError, match="quantize: only layers that train are replaced"):
        replace_transformer_layer(type(layers[0]), model, quantize=True)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("invertible", [False, True])
def test_a_layer_trains_under_autocast_as_torch_does(gelu: bool, invertible: bool) -> None:
    made, x = layer(gelu_checkpoint=gelu, normalize_invertible=invertible), torch.randn(2, LENGTH, HIDDEN)
    found: list[list[Tensor]] = []
    for mine in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            output = made(x, None) if mine else oracle(made, x, None)
        output.float().square().mean().backward()
        found.append([output.detach().float(), *(parameter.grad.clone() for parameter in made.parameters()
                                                 if parameter.grad is not None)])
        made.zero_grad()
    for value, wanted in zip(*found, strict=True):
        torch.testing.assert_close(value, wanted, rtol=5e-2, atol=5e-2)


@torch.no_grad()
def test_generation_in_training_mode_is_the_models_own() -> None:
    plain, mine = (hugging_face("gpt2", dropout=0.0).train() for _ in range(2))
    inject_transformer_layers(mine)
    ids = torch.arange(9)[None]
    wanted, found = plain(input_ids=ids, use_cache=True), mine(input_ids=ids, use_cache=True)
    assert found.past_key_values.get_seq_length() == wanted.past_key_values.get_seq_length() == 9
    later = torch.tensor([[3]])
    torch.testing.assert_close(mine(input_ids=later, past_key_values=found.past_key_values).last_hidden_state,
                               plain(input_ids=later, past_key_values=wanted.past_key_values).last_hidden_state)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_attention_probabilities_come_from_the_models_own_layers(kind: str) -> None:
    model = hugging_face(kind).train()
    model.set_attn_implementation("eager")
    inject_transformer_layers(model)
    assert len(model(input_ids=torch.arange(9)[None], output_attentions=True).attentions) == model.config.num_hidden_layers


@pytest.mark.parametrize("mask", [
    torch.ones(2, LENGTH, dtype=torch.long), torch.zeros(3, 1, 1, LENGTH), torch.zeros(2, LENGTH - 1),
    torch.zeros(2, 1, LENGTH), torch.ones(2, 32, dtype=torch.long)],
    ids=["whole numbers", "batch", "length", "dims", "whole numbers in whole blocks"])
def test_a_mask_that_does_not_fit_is_refused_with_its_shape(mask: Tensor) -> None:
    with pytest.raises(UsageError) as found:
        layer()(torch.randn(2, 32 if mask.shape[-1] == 32 else LENGTH, HIDDEN), mask)
    assert str(tuple(mask.shape)) in str(found.value)


def test_a_word_for_kernels_that_is_none_of_the_three_is_refused() -> None:
    from shoal.nn import TiledHead, set_linear_kernels

    choice: Any = "onednnn"
    config = TransformerConfig(hidden_size=HIDDEN, heads=HEADS, num_hidden_layers=1)
    calls = [lambda: TransformerLayer(config, kernels=choice)(torch.randn(1, LENGTH, HIDDEN)),
             lambda: TiledHead(HIDDEN, 8, kernels=choice)(torch.randn(1, HIDDEN), torch.zeros(1, dtype=torch.long)),
             lambda: set_linear_kernels(nn.Sequential(nn.Linear(2, 2)), choice)]
    for call in calls:
        with pytest.raises((ConfigError, UsageError), match="onednnn"):
            call()


def test_weights_may_be_given_by_functional_call_or_a_parametrization() -> None:
    made, x = layer(), torch.randn(2, LENGTH, HIDDEN)
    want = made(x)
    values = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(layer(initializer_range=1.0), values, (x,)), want)
    nn.utils.parametrizations.weight_norm(made, "attn_ow")
    torch.testing.assert_close(made(x), want)


def test_a_layer_may_be_exported_and_made_of_fake_tensors() -> None:
    made, x = layer(normalize_invertible=True, gelu_checkpoint=True).eval(), torch.randn(2, LENGTH, HIDDEN)
    torch.testing.assert_close(torch.export.export(made, (x,), strict=False).module()(x), made(x))
    with FakeTensorMode():
        assert layer()(torch.randn(2, LENGTH, HIDDEN)).shape == x.shape


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of its attention
def test_a_layer_maps_and_differentiates_under_torch_func() -> None:
    made, x = layer(normalize_invertible=True, gelu_checkpoint=True), torch.randn(3, 2, LENGTH, HIDDEN)
    torch.testing.assert_close(torch.vmap(made)(x), torch.stack([made(each) for each in x]))
    leaf = x[0].clone().requires_grad_()
    want, = torch.autograd.grad(made(leaf).square().sum(), leaf)
    got = torch.func.grad(lambda each: made(each).square().sum())(x[0])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_hidden_states_of_another_dtype_are_refused() -> None:
    with pytest.raises(UsageError, match=r"got hidden states of torch.float32, and the weights are torch.float16"):
        layer(fp16=True)(torch.randn(2, LENGTH, HIDDEN))
