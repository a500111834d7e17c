"""Laws of a folder of checkpoints: what stands under a tag is complete, and the one that is wanted is found or explained."""

import os
from pathlib import Path

import pytest
from checkpoint_cases import assert_holds, save, state, whole

from shoal.checkpoint import Writer, latest, read, tags
from shoal.errors import CheckpointError, UsageError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_save_leaves_its_tag_and_latest_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, "a")
    assert names(tmp_path) == ["a", "latest"]
    assert names(tmp_path / "a") == ["index.json", "rank00000-000.safetensors"]
    assert (tmp_path / "latest").read_text() == "a\n"


def test_no_tag_means_the_latest(tmp_path: Path) -> None:
    save(tmp_path, "a", step=5)
    save(tmp_path, "b", step=1)
    with read(tmp_path) as snapshot:
        assert (snapshot.tag, snapshot.step) == ("b", 1)


def test_a_save_may_leave_latest_alone(tmp_path: Path) -> None:
    save(tmp_path, "a")
    save(tmp_path, "b", latest=False)
    assert latest(tmp_path) == "a"


def test_tags_are_listed_by_step(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        save(tmp_path, f"step{step}", step=step)
    assert [(tag.name, tag.step) for tag in tags(tmp_path)] == [("step9", 9), ("step10", 10), ("step100", 100)]


def test_what_is_not_complete_is_not_listed(tmp_path: Path) -> None:
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


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(4):
        save(tmp_path, f"step{step}", step=step, keep_last=2)
    assert names(tmp_path) == ["latest", "step2", "step3"]


def test_what_was_just_written_is_kept_though_others_have_later_steps(tmp_path: Path) -> None:
    for step in (7, 8, 3):
        save(tmp_path, f"step{step}", step=step, keep_last=2)
    assert names(tmp_path) == ["latest", "step3", "step7", "step8"]


def test_only_complete_checkpoints_are_removed(tmp_path: Path) -> None:
    save(tmp_path, "damaged", step=0)
    (tmp_path / "damaged" / "index.json").unlink()
    (tmp_path / "notes").mkdir()
    save(tmp_path, "a", step=1)
    save(tmp_path, "b", step=2, keep_last=1)
    assert names(tmp_path) == ["b", "damaged", "latest", "notes"]


def test_a_checkpoint_that_is_being_read_is_not_removed(tmp_path: Path) -> None:
    save(tmp_path, "a", step=1)
    with read(tmp_path, "a") as snapshot:
        save(tmp_path, "b", step=2, keep_last=1)
        assert_holds(snapshot, state())
    save(tmp_path, "c", step=3, keep_last=1)
    assert names(tmp_path) == ["c", "latest"]


def test_a_snapshot_reads_on_while_its_tag_is_replaced_and_what_it_held_is_removed_later(tmp_path: Path) -> None:
    save(tmp_path, "a", state(1))
    with read(tmp_path) as first:
        save(tmp_path, "a", state(2))
        with read(tmp_path) as second:
            save(tmp_path, "a", state(3))
            assert_holds(second, state(2))
        assert_holds(first, state(1))
    save(tmp_path, "b", state(4))
    assert names(tmp_path) == ["a", "b", "latest"]
    assert_holds(read(tmp_path, "a"), state(3))


def test_the_staging_buffer_is_kept_between_saves(tmp_path: Path) -> None:
    writer = Writer()
    for seed in (1, 2):
        writer.write(tmp_path, f"seed{seed}", whole(state(seed)))
    writer.wait()
    for seed in (1, 2):
        assert_holds(read(tmp_path, f"seed{seed}"), state(seed))


@pytest.mark.parametrize("tag", ["", ".", "..", ".hidden", "a/b", "latest", "a\\b", "a\nb"])
def test_a_tag_that_is_no_plain_folder_is_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(UsageError, match=r"^checkpoint tag: got .*; a tag is the name of one folder: not empty, no slash, "):
        save(tmp_path, tag)
    assert names(tmp_path) == []


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^keep_last: got 0; keep at least 1 checkpoint, or None to keep all$"):
        save(tmp_path, "a", keep_last=0)


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match=r"a: exists and is no checkpoint, so it is not replaced; choose another tag"):
        save(tmp_path, "a")
    assert names(tmp_path / "a") == ["thesis.tex"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^could not load: .*nowhere: no such folder$"):
        read(tmp_path / "nowhere")


def test_a_missing_tag_is_answered_with_the_tags_that_are_there(tmp_path: Path) -> None:
    save(tmp_path, "b", step=1)
    save(tmp_path, "a", step=2)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'c'; tags there: b, a$"):
        read(tmp_path, "c")


def test_an_empty_folder_says_that_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing is named 'latest' there, so say which tag; no checkpoint is there$"):
        read(tmp_path)


def test_a_latest_that_names_nothing_is_answered_with_the_tags_that_are_there(tmp_path: Path) -> None:
    save(tmp_path, "a")
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match=r"'latest' says 'gone', but there is no checkpoint 'gone'; tags there: a$"):
        read(tmp_path)


def test_asking_for_the_private_state_of_a_rank_that_was_not_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, "a")
    with pytest.raises(CheckpointError, match=r"a: saved by ranks 0 to 0, there is no rank 1$"):
        read(tmp_path).private(1)
