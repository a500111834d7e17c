"""A channel delivers every value in order, for the bytes of its tensors and a 16-byte header."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import CollectiveTimeout, StageFailed, UsageError
from shoal.pipeline.channel import Receiver, Sender
from shoal.pipeline.message import AHEAD, HEADER_BYTES, KNOWN_FORMS, SMALL_BYTES
from shoal.pipeline.value_tree import flatten_tree
from shoal.testing import run_ranks
from shoal.transport.collectives import traffic

HOST = torch.device("cpu")


def ends(number: int = 0, timeout: float = 20) -> Sender | Receiver:
    """Return this rank's end of a channel from rank 0 to rank 1."""
    group = dist.group.WORLD
    assert group is not None
    name = "activations of stage 1 from stage 0"
    if dist.get_rank() == 0:
        return Sender(group, 1, number, device=HOST, timeout=timeout, name=name)
    return Receiver(group, 0, number, device=HOST, timeout=timeout, name=name)


def transfer(values: list[Any]) -> list[Any]:
    """Send `values` from rank 0; return what rank 1 received."""
    end = ends()
    found: list[Any] = []
    if isinstance(end, Sender):
        for value in values:
            end.send(value)
        end.flush()
    else:
        end.expect(len(values))
        found = [end.receive() for _ in values]
    end.close()
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return (one.dtype == other.dtype and one.shape == other.shape and one.requires_grad == other.requires_grad
                and other.is_leaf and torch.equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def every_kind() -> list[Any]:
    torch.manual_seed(0)
    wide = torch.randn(3, 4, 5, requires_grad=True)
    shared = torch.randn(2)
    return [
        wide, torch.randn(2, 3), torch.tensor(2.5, requires_grad=True), torch.tensor(7), torch.zeros(0, 4),
        torch.tensor([True, False]), torch.randn(5).bfloat16().requires_grad_(), torch.randn(4).half(),
        torch.randn(3).double(), torch.randn(3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64).conj(),
        torch.arange(6, dtype=torch.uint8), torch.randn(4, 6).t(), torch.randn(8)[::2], torch.randn(2, 1).expand(2, 3),
        torch.randn(3 << 20), (torch.randn(2), torch.ones(3, dtype=torch.int64), None),
        {"x": torch.randn(2, 2), "mask": torch.ones(2) > 0, "n": 3}, [shared, {"same": shared}], (),
        None, "text", 3.5, {"nothing": []},
    ]  # fmt: skip


def every_kind_arrives() -> list[bool]:
    values = every_kind()
    return [same(a, b) for a, b in zip(values, transfer(values), strict=False)]


def test_every_kind_of_value_arrives() -> None:
    found = run_ranks(2, every_kind_arrives)[1]
    assert found == [True] * len(every_kind())


def shared_once() -> bool:
    one = torch.randn(2)
    found = transfer([(one, [one])])
    return dist.get_rank() == 0 or found[0][0] is found[0][1][0]


def test_a_tensor_in_two_places_arrives_as_one() -> None:
    assert run_ranks(2, shared_once) == [True, True]


def many_forms(width: int, pause: bool) -> bool:
    """Send small and large forms that repeat, alternate, and outnumber the forms that both ends keep."""
    chance = random.Random(0)
    kinds = [1, 1, 1, 2, 2, *(chance.choice([3, 4]) for _ in range(50)), *range(5, 5 + 2 * KNOWN_FORMS), 1, 1, 1, 1, 1, 1, 0,
             *(kind for _ in range(40) for kind in [chance.randrange(8)] * chance.randrange(9)), 1, 1, 1, 1, 1,
             *(chance.randrange(2 * KNOWN_FORMS) for _ in range(200)), 3, 3, 3]
    values = [torch.full((width * kind,), float(index)) if kind % 3 else
              {"n": kind, "x": (torch.tensor([index] * 5), torch.zeros(width * kind))} for index, kind in enumerate(kinds)]
    end = ends()
    if isinstance(end, Receiver):
        end.expect(len(values))
    for value in values:
        if isinstance(end, Receiver):
            if not same(value, end.receive()):
                return False
        else:
            end.send(value)
            if pause and chance.random() < 0.3:
                end.flush()
    if isinstance(end, Sender):
        end.flush()
    return True


@pytest.mark.parametrize(("width", "pause"), [(1, False), (4, True), (4000, False), (4000, True), (20_000, True)])
def test_messages_of_many_forms_arrive_in_order(width: int, pause: bool) -> None:
    """From no bytes to 10 MB: with and without headers, predicted and not."""
    assert all(run_ranks(2, many_forms, width, pause))


def ring() -> list[float]:
    """Send numbers both ways around a ring of three ranks, over two channels between any two."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    onward = Sender(group, right, rank, device=HOST, timeout=20, name="to the right")
    back = Sender(group, left, ranks + rank, device=HOST, timeout=20, name="to the left")
    from_left = Receiver(group, left, left, device=HOST, timeout=20, name="from the left")
    from_right = Receiver(group, right, ranks + right, device=HOST, timeout=20, name="from the right")
    found: list[float] = []
    for step in range(20):
        from_left.expect(1)
        from_right.expect(1)
        onward.send(torch.tensor(10.0 * step + rank))
        back.send(torch.tensor(1000 + 10.0 * step + rank))
        found += [from_right.receive().item(), from_left.receive().item()]
    for end in (onward, back, from_left, from_right):
        end.close()
    wanted = [value for step in range(20) for value in (1000 + 10.0 * step + right, 10.0 * step + left)]
    return [a - b for a, b in zip(found, wanted, strict=True)]


def test_channels_do_not_mix() -> None:
    assert run_ranks(3, ring) == [[0.0] * 40] * 3


def tensors_alive(size: int) -> list[bool]:
    tensors = [torch.randn(size) for _ in range(5)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    kept: list[Tensor] = []
    end = ends()
    if isinstance(end, Sender):
        end.expect(5)
        while tensors:
            end.send({"x": tensors.pop()})
        assert not end._posted, "the thread got all at the last announced message"  # pyright: ignore[reportPrivateUsage]
        end.flush()
        gc.collect()
        return [ref() is not None for ref in alive]
    end.expect(5)
    kept += [end.receive()["x"] for _ in range(5)]
    alive = [weakref.ref(tensor) for tensor in kept]
    kept.clear()
    return [ref() is not None for ref in alive]


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_sent_and_received_tensors_are_released(size: int) -> None:
    assert run_ranks(2, tensors_alive, size) == [[False] * 5] * 2


def warm(end: Sender | Receiver, messages: int, size: int) -> None:
    """Send messages of one form, so that the form is predicted afterwards, unless there are none."""
    if isinstance(end, Receiver):
        end.expect(messages)
    for _ in range(messages):
        end.receive() if isinstance(end, Receiver) else end.send(torch.zeros(size))
    if isinstance(end, Sender):
        end.flush()


def set_timeout(end: Sender | Receiver, seconds: float) -> None:
    """Change the timeout of an end after `warm`: a short one is for waits that must time out."""
    end._timeout = seconds  # pyright: ignore[reportPrivateUsage]


def held_back(before: int, size: int) -> str:
    """Announce five messages and receive none: the sender keeps those for which the receiver has no room."""
    end = ends()
    message = ""
    warm(end, before, size)
    set_timeout(end, 0.5)
    dist.barrier()
    if isinstance(end, Receiver):
        end.expect(5)
    else:
        for index in range(5):
            end.send(torch.full((size,), float(index)))
        with pytest.raises(CollectiveTimeout) as caught:
            end.flush()
        message = str(caught.value)
    dist.barrier()
    set_timeout(end, 20)
    if isinstance(end, Receiver):
        assert [end.receive()[0].item() for _ in range(5)] == [0, 1, 2, 3, 4]
    else:
        end.flush()
    end.close()
    return message


@pytest.mark.parametrize("before", [0, 9])
@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_full_receiver_makes_flush_time_out_and_name_its_rank(before: int, size: int) -> None:
    error = run_ranks(2, held_back, before, size)[0]
    assert error == ('rank 0: activations of stage 1 from stage 0: rank 1 did not receive them within 0.5 s: it took a '
                    'different path, stopped, or is that slow; raise "timeout"')


def silent(before: int) -> str:
    end = ends()
    warm(end, before, 3)
    set_timeout(end, 0.3)
    if isinstance(end, Sender):
        return ""
    end.expect(1)
    with pytest.raises(CollectiveTimeout) as caught:
        end.receive()
    return str(caught.value)


@pytest.mark.parametrize("before", [0, 9])
def test_a_message_that_does_not_arrive_is_named_at_the_timeout(before: int) -> None:
    error = run_ranks(2, silent, before)[1]
    assert error.startswith("rank 1: activations of stage 1 from stage 0 did not come from rank 0 within 0.3 s")


def idle() -> float:
    """Let more than the timeout pass with no message expected, and with one expected that no caller asks for."""
    end = ends(timeout=0.2)
    if isinstance(end, Sender):
        set_timeout(end, 20)
        dist.barrier()
        end.send(torch.tensor(3.0))
        end.flush()
        return 3.0
    with pytest.raises(AssertionError, match="without expect"):
        end.receive()
    end.expect(1)
    end._thread.join(0.5)  # pyright: ignore[reportPrivateUsage]  waits longer than the timeout
    set_timeout(end, 20)
    dist.barrier()
    return end.receive().item()


def test_the_timeout_counts_only_time_in_receive() -> None:
    assert run_ranks(2, idle) == [3.0, 3.0]


def aborted(before: int) -> list[str]:
    end = ends(timeout=30)
    errors: list[str] = []
    warm(end, before, 2)
    if isinstance(end, Sender):
        end.send(torch.ones(2))
        end.abort("stage 0, 0F1: the iterator ended")
    else:
        end.expect(4)
        assert end.receive().tolist() == [1, 1]
        for _ in range(2):
            with pytest.raises(StageFailed) as caught:
                end.receive()
            errors.append(str(caught.value))
    end.close()
    return errors


@pytest.mark.parametrize("before", [0, 9])
def test_an_abort_raises_in_every_later_receive(before: int) -> None:
    assert run_ranks(2, aborted, before)[1] == ["stage 0, 0F1: the iterator ended"] * 2


def counted(values: list[Any]) -> list[int]:
    end = ends()
    found: list[int] = []
    if isinstance(end, Receiver):
        end.expect(len(values))
    for value in values:
        before = traffic.bytes["pipeline"]
        end.receive() if isinstance(end, Receiver) else end.send(value)
        found.append(traffic.bytes["pipeline"] - before)
    if isinstance(end, Sender):
        end.flush()
        assert traffic.calls["pipeline"] == len(values)
    return found


def test_a_message_costs_tensors_and_header_and_once_its_tree_spec() -> None:
    small, mixed = torch.zeros(10), (torch.zeros(3), torch.zeros(5, dtype=torch.bool))
    shared = torch.zeros(4)
    values: list[Any] = [small, mixed, small + 1, mixed, [shared, shared]]
    specs = [len(flatten_tree(value, "")[0]) for value in values]
    sent, received = run_ranks(2, counted, values)
    assert HEADER_BYTES == 16
    assert sent == [16 + specs[0] + 40, 16 + specs[1] + 12 + 5, 16 + 40, 16 + 12 + 5, 16 + specs[4] + 16]
    assert received == [0] * len(values), "bytes are counted where they are sent"
    assert max(specs) < 100


@pytest.mark.parametrize(("floats", "header"), [(4, 0), (SMALL_BYTES // 4, 0), (SMALL_BYTES // 4 + 1, 16), (3, 16)])
def test_a_small_predicted_message_costs_only_its_tensors(floats: int, header: int) -> None:
    """Predictions start `AHEAD` messages after two of a form; a message smaller than a filler always has a header."""
    spec, size = len(flatten_tree(torch.zeros(floats), "")[0]), 4 * floats
    sent, _ = run_ranks(2, counted, [torch.zeros(floats) for _ in range(9)])
    assert sent == [16 + spec + size, *[16 + size] * (AHEAD + 1), *[header + size] * (8 - AHEAD - 1)]


def test_a_wrong_prediction_costs_the_predicted_tensors_as_filler() -> None:
    other = torch.zeros(7)
    sent, _ = run_ranks(2, counted, [*[torch.zeros(10)] * 6, other, other, torch.zeros(10), torch.zeros(10)])
    new = 16 + len(flatten_tree(other, "")[0]) + 28
    assert sent[5:] == [40, 40 + new, 40 + 16 + 28, 40, 16 + 40], "predictions: 10, 10, 10, 10, none"


def refused() -> str:
    """Try to send an invalid value, then send a valid one."""
    end = ends()
    if isinstance(end, Receiver):
        end.expect(1)
        assert end.receive().item() == 1
        return ""
    with pytest.raises(UsageError) as caught:
        end.send({"x": torch.ones(1), "file": sys.stdout})
    end.send(torch.tensor(1.0))
    end.flush()
    return str(caught.value)


def test_a_value_that_cannot_be_sent_is_named_and_is_harmless() -> None:
    assert "activations of stage 1 from stage 0: value['file'] cannot be sent" in run_ranks(2, refused)[0]


SCRIPT = """
    import os, sys, torch, torch.distributed as dist
    import shoal
    from shoal.pipeline.channel import Receiver, Sender
    shoal.init_distributed("gloo")
    rank, ending = dist.get_rank(), sys.argv[1]
    near, far = (Sender, Receiver) if rank == 0 else (Receiver, Sender)
    end = near(dist.group.WORLD, 1 - rank, 0, device=torch.device("cpu"), timeout=60, name="activations of stage 1")
    back = far(dist.group.WORLD, 1 - rank, 1, device=torch.device("cpu"), timeout=60, name="gradients of stage 0")
    before = 9 if ending.endswith("predicted") else 1
    if rank == 0:
        for _ in range(before):
            end.send(torch.ones(3))
        end.flush()
        if ending.startswith("death"):
            os._exit(9)
        back.expect(1)
        dist.barrier()
        raise SystemExit(ending)
    end.expect(before + 1)
    for _ in range(before):
        end.receive()
    if ending.startswith("death"):
        end.receive()
    dist.barrier()
    if ending.startswith("error"):
        raise ValueError("the reason")
"""


def outcome(ending: str, folder: Path) -> tuple[int, str]:
    """Run the script on two ranks; return the exit code and the stderr of rank 1."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": str(uuid4())}
    ranks = [subprocess.Popen([sys.executable, str(script), ending], stderr=subprocess.PIPE, text=True, env={
        **os.environ, **mpi, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}) for rank in ("0", "1")]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    return ranks[1].returncode, errors[1]


@pytest.mark.parametrize("ending", ["death", "death predicted"])
def test_a_peer_that_dies_is_named_at_once(ending: str, tmp_path: Path) -> None:
    code, stderr = outcome(ending, tmp_path)
    assert code == 1
    assert "CollectiveFailed: rank 1: activations of stage 1 broke: " in stderr
    assert "If rank 0 died or closed its connection, the error in the output of that rank is the cause" in stderr


@pytest.mark.parametrize(("ending", "code"), [
    ("error", 1), ("error predicted", 1), ("leaving", 0), ("leaving predicted", 0),
])  # fmt: skip
def test_endpoints_that_still_wait_let_the_interpreter_exit(ending: str, code: int, tmp_path: Path) -> None:
    found, stderr = outcome(ending, tmp_path)
    assert (found, "the reason" in stderr) == (code, code == 1), stderr
    assert "terminate" not in stderr
