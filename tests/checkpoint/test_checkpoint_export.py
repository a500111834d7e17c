"""An export equals the model's state dict; an incomplete model is not exported."""

import json
from pathlib import Path

import pytest
import torch
from checkpoint_cases import State, whole
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from shoal.checkpoint import Writer, export, export_dcp, read
from shoal.errors import CheckpointError


class Model(nn.Module):
    """A model with tied and frozen parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def pieces_of(model: Model) -> State:
    """Return the tensors that an engine saves: fp32 weights, moments of trained parameters, buffers."""
    tensors: State = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach()
        if parameter.requires_grad:
            tensors[f"exp_avg/{name}"] = torch.zeros_like(parameter)
    return tensors | {f"buffer/{name}": buffer for name, buffer in model.named_buffers()}


def shared_of(model: Model) -> dict[str, object]:
    return {"parameters": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
            "tied": {"head.weight": "embed.weight"}}


@pytest.fixture
def folder(model: Model, tmp_path: Path) -> Path:
    Writer().write(tmp_path / "run", "a", whole(pieces_of(model)), shared=shared_of(model)).wait()
    return tmp_path / "run"


def load_shards(folder: Path) -> dict[str, Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in files.values() for t in tensors.values())
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_an_export_equals_the_state_dict(folder: Path, model: Model, tmp_path: Path) -> None:
    with read(folder) as snapshot:
        assert export(snapshot, tmp_path / "out") == [tmp_path / "out" / "model.safetensors"]
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), model.state_dict())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_shards_equal_one_file_and_none_exceeds_the_limit(folder: Path, model: Model, tmp_path: Path) -> None:
    with read(folder) as snapshot:
        files = export(snapshot, tmp_path / "out", shard_bytes=200)
    assert [file.name for file in files] == [
        *(f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)), "model.safetensors.index.json"]
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 200 for file in files[:-1])
    assert_equal(load_shards(tmp_path / "out"), model.state_dict())


def test_a_tensor_larger_than_a_shard_has_its_own_shard(folder: Path, model: Model, tmp_path: Path) -> None:
    with read(folder) as snapshot:
        export(snapshot, tmp_path / "out", shard_bytes=1)
    assert_equal(load_shards(tmp_path / "out"), model.state_dict())


def test_parameters_are_cast_and_buffers_are_not(folder: Path, model: Model, tmp_path: Path) -> None:
    with read(folder) as snapshot:
        export(snapshot, tmp_path / "out", dtype=torch.float16)
    parameters = {"head.weight", *(name for name, _ in model.named_parameters())}
    expected = {name: t.half() if name in parameters else t for name, t in model.state_dict().items()}
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_torch_reads_the_dcp_export(folder: Path, model: Model, tmp_path: Path) -> None:
    with read(folder) as snapshot:
        export_dcp(snapshot, tmp_path / "dcp")
    found = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    with pytest.warns(UserWarning, match=r"torch.distributed is disabled"):
        load_dcp(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_equal(found, model.state_dict())


def test_export_of_an_incomplete_model_raises_and_writes_nothing(model: Model, tmp_path: Path) -> None:
    tensors = pieces_of(model)
    del tensors["weight/frozen.bias"]
    tensors["weight/frozen.weight"] = torch.zeros(0)
    Writer().write(tmp_path, "a", whole(tensors), shared=shared_of(model)).wait()
    with pytest.raises(CheckpointError) as caught, read(tmp_path) as snapshot:
        export(snapshot, tmp_path / "out")
    assert str(caught.value) == (f"{tmp_path}/a: the model is incomplete, so it is not exported:\n"
                                 "  frozen.weight: saved with shape (0,), the model has (4, 4)\n"
                                 "  frozen.bias: missing")
    assert not (tmp_path / "out").exists()


def test_export_rejects_an_empty_tensor_of_unknown_shape(tmp_path: Path) -> None:
    Writer().write(tmp_path, "a", whole({"weight/x": torch.zeros(0, 3)})).wait()
    with pytest.raises(CheckpointError, match=r"\n  x: empty, saved with shape \(0, 3\)$"), read(tmp_path) as snapshot:
        export(snapshot, tmp_path / "out")


def test_export_rejects_a_folder_that_is_not_empty(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"run: exists and is not an empty folder; export to a new one$"), \
            read(folder) as snapshot:
        export(snapshot, folder)


def test_a_damaged_tensor_stops_the_export_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    path = folder / "a" / "rank00000-000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match=r"damaged in rank00000-000.safetensors of rank 0"), read(folder) as snapshot:
        export(snapshot, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_full_disk_stops_the_export_and_leaves_nothing(
        folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shoal.checkpoint.state_dict_export as module

    def run_out(descriptor: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_all", run_out)
    with pytest.raises(CheckpointError, match=r"^could not export to .*out: no space is left in .*: this rank needs "), \
            read(folder) as snapshot:
        export(snapshot, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
