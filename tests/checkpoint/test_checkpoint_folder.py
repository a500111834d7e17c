"""Every tag of a folder names a complete checkpoint, and an error for a missing tag lists the existing ones."""

import os
from pathlib import Path

import pytest
from checkpoint_cases import assert_equal_state, save, state, whole

from shoal.checkpoint import Writer, latest, read, tags
from shoal.errors import CheckpointError, UsageError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_save_leaves_only_its_tag_and_latest(tmp_path: Path) -> None:
    save(tmp_path, "a")
    assert names(tmp_path) == ["a", "latest"]
    assert names(tmp_path / "a") == ["index.json", "rank00000-000.safetensors"]
    assert (tmp_path / "latest").read_text() == "a"


def test_no_tag_means_the_latest(tmp_path: Path) -> None:
    save(tmp_path, "a", step=5)
    save(tmp_path, "b", step=1)
    with read(tmp_path) as snapshot:
        assert (snapshot.tag, snapshot.step) == ("b", 1)


def test_a_save_can_leave_latest_unchanged(tmp_path: Path) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", latest=False)
    assert latest(tmp_path) == "a"


def test_tags_are_listed_by_step(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        save(tmp_path, f"step{step}", step=step)
    assert [(tag.name, tag.step) for tag in tags(tmp_path)] == [("step9", 9), ("step10", 10), ("step100", 100)]


def test_incomplete_checkpoints_are_not_listed(tmp_path: Path) -> None:
    for tag in ("a", "b", "c", "d"):
        save(tmp_path, tag)
    (tmp_path / "a" / "index.json").unlink()
    (tmp_path / "b" / "rank00000-000.safetensors").unlink()
    os.truncate(tmp_path / "c" / "rank00000-000.safetensors", 100)
    (tmp_path / "notes").mkdir()
    assert [tag.name for tag in tags(tmp_path)] == ["d"]


def test_a_folder_without_checkpoints_lists_none(tmp_path: Path) -> None:
    assert tags(tmp_path) == []
    assert latest(tmp_path) is None


def test_keep_last_keeps_the_newest_checkpoints(tmp_path: Path) -> None:
    for step in range(4):
        save(tmp_path, f"step{step}", step=step, keep_last=2)
    assert names(tmp_path) == ["latest", "step2", "step3"]


def test_keep_last_never_removes_the_checkpoint_just_written(tmp_path: Path) -> None:
    for step in (7, 8, 3):
        save(tmp_path, f"step{step}", step=step, keep_last=2)
    assert names(tmp_path) == ["latest", "step3", "step7", "step8"]


def test_keep_last_removes_only_complete_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, "damaged", step=0)
    (tmp_path / "damaged" / "index.json").unlink()
    (tmp_path / "notes").mkdir()
    save(tmp_path, "a", step=1)
    save(tmp_path, "b", step=2, keep_last=1)
    assert names(tmp_path) == ["b", "damaged", "latest", "notes"]


def test_an_open_checkpoint_is_not_removed(tmp_path: Path) -> None:
    save(tmp_path, "a", step=1)
    with read(tmp_path, "a") as snapshot:
        save(tmp_path, "b", step=2, keep_last=1)
        assert_equal_state(snapshot, state())
    save(tmp_path, "c", step=3, keep_last=1)
    assert names(tmp_path) == ["c", "latest"]


def test_a_replaced_checkpoint_is_removed_after_its_readers_close(tmp_path: Path) -> None:
    save(tmp_path, "a", state(1))
    with read(tmp_path) as first:
        save(tmp_path, "a", state(2))
        with read(tmp_path) as second:
            save(tmp_path, "a", state(3))
            assert_equal_state(second, state(2))
        assert_equal_state(first, state(1))
    save(tmp_path, "b", state(4))
    assert names(tmp_path) == ["a", "b", "latest"]
    assert_equal_state(read(tmp_path, "a"), state(3))


def test_the_staging_buffer_is_kept_between_saves(tmp_path: Path) -> None:
    writer = Writer()
    for seed in (1, 2):
        writer.write(tmp_path, f"seed{seed}", whole(state(seed)))
    writer.wait()
    for seed in (1, 2):
        assert_equal_state(read(tmp_path, f"seed{seed}"), state(seed))


@pytest.mark.parametrize("tag", ["", ".", "..", ".hidden", "a/b", "latest", "a\\b", "a\nb"])
def test_a_tag_that_is_not_a_plain_folder_name_is_rejected(tmp_path: Path, tag: str) -> None:
    with pytest.raises(UsageError, match=r"^checkpoint tag: got .*; a tag is a folder name: not empty, no slash, "):
        save(tmp_path, tag)
    assert names(tmp_path) == []


def test_keep_last_of_zero_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^keep_last: got 0; give 1 or more, or None to keep all$"):
        save(tmp_path, "a", keep_last=0)


def test_a_folder_that_is_not_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match=r"a: exists and is not a checkpoint, so it is not replaced; choose"):
        save(tmp_path, "a")
    assert names(tmp_path / "a") == ["thesis.tex"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^could not load: .*nowhere: no such folder$"):
        read(tmp_path / "nowhere")


def test_a_missing_tag_error_lists_the_existing_tags(tmp_path: Path) -> None:
    save(tmp_path, "b", step=1)
    save(tmp_path, "a", step=2)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'c'; existing tags: b, a$"):
        read(tmp_path, "c")


def test_reading_an_empty_folder_says_that_it_has_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no 'latest' file; give a tag; it has no checkpoint$"):
        read(tmp_path)


def test_a_stale_latest_error_lists_the_existing_tags(tmp_path: Path) -> None:
    save(tmp_path, "a")
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match=r"latest' names 'gone', but there is no checkpoint 'gone'; existing tags: a$"):
        read(tmp_path)


def test_private_state_of_a_rank_that_did_not_save_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, "a")
    with pytest.raises(CheckpointError, match=r"a: saved by ranks 0 to 0, got rank 1$"):
        read(tmp_path).private(1)
