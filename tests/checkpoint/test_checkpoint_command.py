"""`shoal checkpoint` lists, verifies and exports a checkpoint, and its exit code reports damage and user errors."""

from pathlib import Path

import pytest
import torch
from checkpoint_cases import SHARDINGS, save, state
from safetensors.torch import load_file
from test_checkpoint_damage import RANK_FILE, flip

from shoal.checkpoint import Ranks, Writer, inspect
from shoal.launch.cli import main
from shoal.testing import run_ranks


def save_by_ranks(folder: str) -> None:
    ranks = Ranks.join()
    Writer(ranks).write(folder, "step3", SHARDINGS["flat"](state(), ranks.rank, ranks.count), step=3).wait()


def test_inspect_lists_tensors_and_the_ranks_that_wrote_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(3, save_by_ranks, str(tmp_path))
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "weight/cube" in line]
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    assert cells == ["weight/cube", "3 x 5 x 7", "float64", "840", "3", "0-2"]
    size = sum(file.stat().st_size for file in (tmp_path / "step3").glob("*.safetensors"))
    assert f"step 3, saved by 3 ranks: 7 tensors, {size:,} bytes in 3 files" in shown


def test_inspect_accepts_a_tag(tmp_path: Path) -> None:
    save(tmp_path, "a", step=1)
    save(tmp_path, "b", step=2)
    assert (inspect(tmp_path, "a").step, inspect(tmp_path).step) == (1, 2)


def test_verify_passes_an_intact_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "a")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/a: intact (7 tensors, ")


def test_verify_reports_the_location_of_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "a")
    flip(tmp_path / "a" / RANK_FILE, -1)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/a: damaged (7 tensors, ")
    assert second == f"  buffer/mask: damaged in {tmp_path}/a/{RANK_FILE} (rank 0), elements [0, 9)"


def test_export_prints_the_written_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "a", {"weight/x": torch.ones(100), "weight/y": torch.ones(100)})
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(tmp_path), str(out), "--dtype", "bfloat16", "--max-shard-size", "0.2kB"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [str(out / name) for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                                    "model.safetensors.index.json")]
    assert torch.equal(load_file(printed[0])["x"], torch.ones(100, dtype=torch.bfloat16))


def test_a_folder_without_checkpoints_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("give a tag; it has no checkpoint\n")


@pytest.mark.parametrize("size", ["", "0", "5 pounds", "-1GB"])
def test_an_invalid_size_is_rejected(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["checkpoint", "export", "run", "out", f"--max-shard-size={size}"])
    assert f"--max-shard-size: got {size!r}; give " in capsys.readouterr().err
