"""Cut linear layers give what one whole layer gives: values, gradients, first weights, and DTensor's results."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from shoal.errors import UsageError
from shoal.mesh.tensor_slice import TensorSlice, cuts_of, whole
from shoal.tensor_parallel import Axis, ColumnLinear, QKVLinear, RowLinear, enter, part_init
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

HIDDEN, MIDDLE = 8, 24
SHAPE = (3, 4, HIDDEN)


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def joined(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors named like the model's parameters as one rank would have them; whole ones must agree to the bit."""
    cuts = cuts_of(model)
    everyone: list[dict[str, tuple[TensorSlice | None, Tensor]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {name: (cuts.get(name), tensor.detach()) for name, tensor in tensors.items()})
    result = dict[str, Tensor]()
    for name in tensors:
        said, found = zip(*(mine[name] for mine in everyone), strict=True)
        if said[0] is None:
            assert all(torch.equal(other, found[0]) for other in found), f"{name} differs over the ranks"
        result[name] = found[0] if said[0] is None else whole(found, said)
    return result


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


class Mlp(nn.Module):
    def __init__(self, *, bias: bool = True):
        super().__init__()
        self.up = nn.Linear(HIDDEN, MIDDLE, bias=bias)
        self.down = nn.Linear(MIDDLE, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class CutMlp(Mlp):
    def __init__(self, *, bias: bool = True, sequence_dim: int | None = None, dtype: torch.dtype | None = None):
        nn.Module.__init__(self)
        self.up = ColumnLinear(HIDDEN, MIDDLE, world(), bias=bias, sequence_dim=sequence_dim, dtype=dtype)
        self.down = RowLinear(MIDDLE, HIDDEN, world(), bias=bias, sequence_dim=sequence_dim, dtype=dtype)


def trained(model: nn.Module, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a model and the gradient of its input, for the loss sum(output * weight)."""
    x = x.clone().requires_grad_()
    y = model(x)
    (y * weight).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def assert_equal(mine: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    assert mine.keys() == plain.keys()
    for name in plain:
        torch.testing.assert_close(mine[name], plain[name], msg=lambda text, name=name: f"{name}: {text}")


def mlp_parity(sequence_dim: int | None, bias: bool) -> None:
    torch.manual_seed(1)
    plain = Mlp(bias=bias)
    torch.manual_seed(1)
    mine = CutMlp(bias=bias, sequence_dim=sequence_dim)
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE)
    assert_equal(joined(mine, dict(mine.named_parameters())), dict(plain.named_parameters()))
    value, gradient = trained(plain, x, weight)
    axis = Axis(world())

    def cut(tensor: Tensor) -> Tensor:
        return tensor if sequence_dim is None else tensor.chunk(axis.ranks, sequence_dim)[axis.rank].contiguous()

    my_value, my_gradient = trained(mine, cut(x), cut(weight))
    torch.testing.assert_close(my_value, cut(value))
    torch.testing.assert_close(my_gradient, cut(gradient))
    assert_equal(joined(mine, gradients(mine)), gradients(plain))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_column_then_row_is_the_plain_mlp(ranks: int, sequence_dim: int | None, bias: bool) -> None:
    run_ranks(ranks, mlp_parity, sequence_dim, bias)


def dtensor_parity() -> None:
    torch.manual_seed(1)
    mine = CutMlp()
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    theirs = parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE)
    for one, other in zip(trained(mine, x, weight), trained(theirs, x, weight), strict=True):
        torch.testing.assert_close(one, other)
    full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients(theirs).items()}
    assert_equal(joined(mine, gradients(mine)), full)


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_are_those_of_dtensor(ranks: int) -> None:
    run_ranks(ranks, dtensor_parity)


def converted(input_first: bool) -> None:
    torch.manual_seed(1)
    plain = Mlp()
    original = copy.deepcopy(plain)
    if input_first:
        for layer in (plain.up, plain.down):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())
    mine = copy.copy(plain)
    mine._modules = {"up": ColumnLinear.from_linear(plain.up, world(), input_first=input_first),
                     "down": RowLinear.from_linear(plain.down, world(), input_first=input_first)}
    assert_equal(joined(mine, dict(mine.named_parameters())), dict(plain.named_parameters()))
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE)
    for one, other in zip(trained(mine, x, weight), trained(original, x, weight), strict=True):
        torch.testing.assert_close(one, other)
    turned = {name: g.t() if input_first and g.ndim == 2 else g for name, g in gradients(original).items()}
    assert_equal(joined(mine, gradients(mine)), turned)


@pytest.mark.parametrize("input_first", [False, True])
def test_a_whole_layer_gives_its_parts_in_either_orientation(input_first: bool) -> None:
    run_ranks(4, converted, input_first)


def gathered_and_split() -> None:
    torch.manual_seed(1)
    up, down = nn.Linear(HIDDEN, MIDDLE), nn.Linear(MIDDLE, HIDDEN)
    plain = nn.Sequential(up, nn.Tanh(), down)
    mine = nn.Sequential(ColumnLinear.from_linear(up, world(), gather_output=True), nn.Tanh(),
                         RowLinear.from_linear(down, world(), input_is_parallel=False))
    x, weight = torch.randn(SHAPE), torch.randn(SHAPE)
    for one, other in zip(trained(mine, x, weight), trained(plain, x, weight), strict=True):
        torch.testing.assert_close(one, other)
    assert_equal(joined(mine, gradients(mine)), gradients(plain))


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_outputs_and_whole_inputs_need_no_other_layer(ranks: int) -> None:
    run_ranks(ranks, gathered_and_split)


class Attention(nn.Module):
    """Grouped-query attention, plain or sliced, with the heads within the layer."""

    def __init__(self, qkv: nn.Module, out: nn.Module, split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]):
        super().__init__()
        self.qkv, self.out, self.split = qkv, out, split

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads.transpose(1, 2) for heads in self.split(self.qkv(x)))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def attention_parity(heads: int, shared: int, interleaved: bool, sequence_dim: int | None) -> None:
    dim = 4
    width, fused = heads * dim, (heads + 2 * shared) * dim

    def plain_split(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if interleaved:
            groups = y.unflatten(-1, (shared, heads // shared + 2, dim))
            return groups[..., :-2, :].flatten(-3, -2), groups[..., -2, :], groups[..., -1, :]
        q, k, v = y.split((width, shared * dim, shared * dim), -1)
        return q.unflatten(-1, (heads, dim)), k.unflatten(-1, (shared, dim)), v.unflatten(-1, (shared, dim))

    torch.manual_seed(1)
    plain = Attention(nn.Linear(HIDDEN, fused), nn.Linear(width, HIDDEN), plain_split)
    torch.manual_seed(1)
    qkv = QKVLinear(HIDDEN, heads, dim, world(), key_value_heads=shared, interleaved=interleaved, sequence_dim=sequence_dim)
    mine = Attention(qkv, RowLinear(width, HIDDEN, world(), sequence_dim=sequence_dim), qkv.split_heads)
    x, weight, axis = torch.randn(SHAPE), torch.randn(SHAPE), Axis(world())

    def cut(tensor: Tensor) -> Tensor:
        return tensor if sequence_dim is None else tensor.chunk(axis.ranks, sequence_dim)[axis.rank].contiguous()

    for one, other in zip(trained(mine, cut(x), cut(weight)), trained(plain, x, weight), strict=True):
        torch.testing.assert_close(one, cut(other))
    assert_equal(joined(mine, gradients(mine)), gradients(plain))


@pytest.mark.parametrize("sequence_dim", [None, 1])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (8, 4), (12, 4)])
def test_heads_are_divided_in_either_layout(heads: int, shared: int, interleaved: bool, sequence_dim: int | None) -> None:
    run_ranks(4, attention_parity, heads, shared, interleaved, sequence_dim)


def entered_once() -> tuple[int, int]:
    """Bytes of the backward pass of three layers that share one entrance, and of three that do not."""
    axis, sent = Axis(world()), list[int]()
    for entered in (True, False):
        layers = [ColumnLinear(HIDDEN, MIDDLE, world(), entered=entered) for _ in range(3)]
        x = torch.randn(SHAPE, requires_grad=True)
        inner = enter(x, axis) if entered else x
        total = torch.stack([layer(inner).sum() for layer in layers]).sum()
        before = traffic.bytes_sent
        total.backward()
        sent.append(traffic.bytes_sent - before)
    return sent[0], sent[1]


def test_layers_may_share_one_input_region() -> None:
    size = 4 * torch.Size(SHAPE).numel()
    assert run_ranks(2, entered_once) == [(size, 3 * size)] * 2


def prices(sequence_dim: int | None) -> list[tuple[int, int]]:
    axis = Axis(world())
    thin = SHAPE if sequence_dim is None else (SHAPE[0], SHAPE[1] // axis.ranks, SHAPE[2])
    found = list[tuple[int, int]]()
    column = ColumnLinear(HIDDEN, MIDDLE, world(), sequence_dim=sequence_dim)
    row = RowLinear(MIDDLE, HIDDEN, world(), sequence_dim=sequence_dim)
    for layer, shape in ((column, thin), (row, (*SHAPE[:2], MIDDLE // axis.ranks))):
        start = traffic.bytes_sent
        y = layer(torch.zeros(shape, requires_grad=True))
        middle = traffic.bytes_sent
        y.sum().backward()
        found.append((middle - start, traffic.bytes_sent - middle))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_are_those_of_the_docstrings(ranks: int) -> None:
    part = 4 * torch.Size(SHAPE).numel() * (ranks - 1) // ranks
    assert run_ranks(ranks, prices, None) == [[(0, 2 * part), (2 * part, 0)]] * ranks
    assert run_ranks(ranks, prices, 1) == [[(part, 2 * part), (part, part)]] * ranks


def two_passes() -> tuple[bool, int, int]:
    """Gradients of inputs and of weights in two passes, as a zero-bubble schedule takes them, and the bytes of each."""
    torch.manual_seed(1)
    mine = CutMlp()
    x = torch.randn(SHAPE, requires_grad=True)
    loss = mine(x * 1).pow(2).sum()
    at_once = torch.autograd.grad(loss, [x, *mine.parameters()], retain_graph=True)
    marks = [traffic.bytes_sent]
    (x_gradient,) = torch.autograd.grad(loss, [x], retain_graph=True)
    marks.append(traffic.bytes_sent)
    torch.autograd.backward(loss, inputs=list(mine.parameters()))
    marks.append(traffic.bytes_sent)
    apart = [x_gradient, *(p.grad for p in mine.parameters())]
    same = all(b is not None and torch.equal(a, b) for a, b in zip(at_once, apart, strict=True))
    return same, marks[1] - marks[0], marks[2] - marks[1]


def test_a_split_backward_sends_no_message_twice() -> None:
    assert run_ranks(2, two_passes) == [(True, 4 * torch.Size(SHAPE).numel(), 0)] * 2


def frozen() -> list[str]:
    mine = CutMlp()
    mine.up.requires_grad_(False)
    mine(torch.randn(SHAPE)).sum().backward()
    return sorted(gradients(mine))


def test_frozen_weights_get_no_gradient() -> None:
    assert run_ranks(2, frozen) == [["down.bias", "down.weight"]] * 2


def autocast() -> tuple[bool, bool]:
    torch.manual_seed(1)
    mine, x = CutMlp(), torch.randn(SHAPE, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = mine(x)
    y.float().sum().backward()
    return y.dtype == torch.bfloat16, all(p.grad is not None and p.grad.dtype == torch.float32 for p in mine.parameters())


def test_autocast_chooses_the_dtype_of_the_product() -> None:
    assert run_ranks(2, autocast) == [(True, True)] * 2


def first_weights(dtype: torch.dtype, block: int) -> list[str]:
    part_init.BLOCK = block
    wrong = list[str]()
    for inputs, outputs in ((4, 8), (12, 20), (100, 36), (40, 404)):
        torch.manual_seed(5)
        plain = [nn.Linear(inputs, outputs, dtype=dtype), nn.Linear(inputs, outputs, dtype=dtype)]
        after = torch.rand(3)
        torch.manual_seed(5)
        mine = nn.ModuleList([ColumnLinear(inputs, outputs, world(), dtype=dtype), RowLinear(inputs, outputs, world(),
                                                                                            dtype=dtype)])
        wanted = dict(nn.ModuleList(plain).named_parameters())
        found = joined(mine, dict(mine.named_parameters()))
        wrong += [f"{name} of {inputs}, {outputs}" for name in wanted if not torch.equal(found[name], wanted[name])]
        if not torch.equal(after, torch.rand(3)):
            wrong.append("the generator")
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1 << 20, 64])
def test_ranks_draw_together_what_one_rank_draws(block: int, dtype: torch.dtype) -> None:
    assert run_ranks(4, first_weights, dtype, block) == [[]] * 4


def copied() -> bool:
    mine = CutMlp()
    x = torch.randn(SHAPE)
    return torch.equal(copy.deepcopy(mine)(x), mine(x))


def test_a_model_can_be_copied() -> None:
    assert run_ranks(2, copied) == [True] * 2


def refusals() -> list[str]:
    said = list[str]()
    for build in (lambda: ColumnLinear(8, 10, world()), lambda: RowLinear(10, 8, world()),
                  lambda: ColumnLinear(8, 12, world(), parts=(4, 4)), lambda: QKVLinear(8, 6, 4, world()),
                  lambda: QKVLinear(8, 8, 4, world(), key_value_heads=2),
                  lambda: QKVLinear(8, 12, 4, world(), key_value_heads=8),
                  lambda: ColumnLinear(8, 8, world(), parts=(4, 4), gather_output=True),
                  lambda: ColumnLinear.from_linear(nn.Conv1d(4, 4, 4), world())):
        with pytest.raises(UsageError) as caught:
            build()
        said.append(str(caught.value))
    return said


def test_sizes_that_do_not_divide_are_refused_with_the_numbers() -> None:
    fix = "make it a multiple of 4"
    starts = (
        f"ColumnLinear: 10 outputs cannot be divided over 4 tensor ranks; {fix} (8 or 12), or use a number of ranks that "
        "divides 10: 1, 2, 5, 10", f"RowLinear: 10 inputs cannot be divided over 4 tensor ranks; {fix} (8 or 12)",
        "ColumnLinear: parts (4, 4) are 8 outputs together, and out_features is 12",
        f"6 heads cannot be divided over 4 tensor ranks; {fix} (4 or 8)",
        f"2 key/value heads cannot be divided over 4 tensor ranks; {fix} (4), or use a number of ranks that divides 2: 1, 2",
        "12 heads cannot share 8 key/value heads equally", "ColumnLinear: gather_output of a fused layer",
        "Conv1d is no linear layer")
    said = run_ranks(4, refusals)[0]
    assert [one.startswith(start) for one, start in zip(said, starts, strict=True)] == [True] * len(starts), said
