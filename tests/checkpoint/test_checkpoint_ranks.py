"""Laws of saving and loading by several ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import CUTS, assert_holds, state

from shoal.checkpoint import Piece, Ranks, Writer, read
from shoal.testing import run_ranks


def save_cut(folder: str, how: str) -> None:
    writer = Writer(Ranks.join())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = list(CUTS[how](state(), rank, ranks))
    writer.write(folder, "step7", pieces, step=7, shared={"from": rank},
                 private={"rank": rank, "rng": torch.full((3,), rank)}, file_bytes=256).wait()


def load_cut(folder: str, how: str) -> tuple[list[bool], object]:
    ranks = Ranks.join()
    wanted = list(CUTS[how](state(), ranks.rank, ranks.count))
    found = [Piece(name=p.name, shape=p.shape, start=p.start, stop=p.stop, data=torch.zeros_like(p.data), offset=p.offset,
                   size=p.size) for p in wanted]
    with read(folder, ranks=ranks) as snapshot:
        snapshot.fill(found)
        privates = [snapshot.private(rank) for rank in range(snapshot.ranks)]
        shared = snapshot.shared
    return [torch.equal(a.data, b.data) for a, b in zip(wanted, found, strict=True)], (shared, [p["rank"] for p in privates])


@pytest.mark.parametrize(("writers", "how", "readers", "then"), [
    (1, "flat", 3, "columns"), (3, "flat", 2, "flat"), (4, "columns", 2, "flat"), (2, "columns", 3, "columns"),
    (3, "columns", 1, "flat")])
def test_what_n_ranks_saved_in_one_cut_m_ranks_load_in_another(
        tmp_path: Path, writers: int, how: str, readers: int, then: str) -> None:
    run_ranks(writers, save_cut, str(tmp_path), how)
    for equal, values in run_ranks(readers, load_cut, str(tmp_path), then):
        assert all(equal)
        assert values == ({"from": 0}, list(range(writers)))
    assert_holds(read(tmp_path), state())
