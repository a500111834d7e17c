"""Shared cases of the checkpoint tests: a state of several tensors, and its sharding by ZeRO and by tensor parallelism."""

from collections.abc import Iterator
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from shoal.checkpoint import Piece, Snapshot, Writer

State = dict[str, Tensor]

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Hypothesis settings without deadlines, because a busy machine is not a failure."""


def state(seed: int = 0) -> State:
    """Return tensors of several dtypes with odd, empty and scalar shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight/embed": torch.randn(13, 8, generator=generator).bfloat16(),
        "master/embed": torch.randn(13, 8, generator=generator),
        "weight/scalar": torch.randn((), generator=generator),
        "weight/cube": torch.randn(3, 5, 7, generator=generator, dtype=torch.float64),
        "buffer/count": torch.randint(0, 99, (5,), generator=generator),
        "buffer/mask": torch.rand(9, generator=generator) > 0.5,
        "buffer/none": torch.zeros(0, 4),
    }


def flat(state: State, rank: int, ranks: int) -> Iterator[Piece]:
    """Shard every tensor into equal flat intervals, as ZeRO does."""
    for name, tensor in state.items():
        step = -(-tensor.numel() // ranks)
        start, stop = (min(tensor.numel(), step * i) for i in (rank, rank + 1))
        yield Piece(name=name, shape=tuple(tensor.shape), start=start, stop=stop, data=tensor.reshape(-1)[start:stop])


def columns(state: State, rank: int, ranks: int) -> Iterator[Piece]:
    """Shard the last dim of every tensor into boxes, as tensor parallelism does; rank 0 has the scalars."""
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        if not shape:
            yield from flat({name: tensor}, min(rank, 1), 1)
            continue
        step = -(-shape[-1] // ranks)
        low, high = (min(shape[-1], step * i) for i in (rank, rank + 1))
        data = tensor[..., low:high].reshape(-1)
        yield Piece(name=name, shape=shape, start=0, stop=data.numel(), data=data, offset=(*[0] * (len(shape) - 1), low),
                    size=(*shape[:-1], high - low))


SHARDINGS = {"flat": flat, "columns": columns}


def whole(state: State) -> list[Piece]:
    return list(flat(state, 0, 1))


def save(folder: Path | str, tag: str, tensors: State | None = None, **options: object) -> None:
    """Save from one rank and wait for the save to end."""
    Writer().write(folder, tag, whole(state() if tensors is None else tensors), **options).wait()  # type: ignore[arg-type]


def assert_equal_state(snapshot: Snapshot, expected: State) -> None:
    assert sorted(snapshot.names()) == sorted(expected)
    for name, tensor in expected.items():
        found = snapshot.tensor(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
