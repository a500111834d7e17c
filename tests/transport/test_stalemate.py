"""Ranks that wait for each other are found exactly where none of them can go on."""

from __future__ import annotations

from dataclasses import replace

from shoal.transport.stalemate import WaitRecord, explain, stalemate


def waiting(tag: int, number: int = 1, *, call: str = "forward after 2 steps", **begun: int) -> WaitRecord:
    counts = {int(name[1:]): count for name, count in begun.items()} | {tag: number}
    return WaitRecord(tag=tag, number=number, what=f"gather of unit '{tag}'", call=call, begun=counts, time=1.0)


def test_two_ranks_in_different_collectives_wait_for_each_other() -> None:
    records = {0: waiting(1), 1: waiting(2)}
    assert stalemate(0, records) == [0, 1] and stalemate(1, records) == [1, 0]


def test_ranks_in_one_collective_wait_for_nothing_but_time() -> None:
    assert stalemate(0, {0: waiting(1), 1: waiting(1)}) == []


def test_a_rank_that_has_begun_what_another_awaits_holds_up_none() -> None:
    records = {0: waiting(1), 1: waiting(2, t1=1)}
    assert stalemate(0, records) == [] and stalemate(1, records) == []


def test_the_same_collective_of_another_turn_is_another() -> None:
    assert stalemate(0, {0: waiting(1, 3, t2=1), 1: waiting(2, 2, t1=2)}) == [0, 1]


def test_a_circle_of_three_ranks_is_found_by_each() -> None:
    """Rank 0 waits for rank 1 alone, rank 1 for rank 2, rank 2 for rank 0."""
    records = {0: waiting(1, t2=1), 1: waiting(2, t3=1), 2: waiting(3, t1=1)}
    assert [stalemate(rank, records) for rank in (0, 1, 2)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_a_rank_outside_of_a_circle_leaves_it_to_the_others() -> None:
    """Ranks 1 and 2 wait for each other, and rank 0 for both."""
    records = {0: waiting(1, t2=1, t3=1), 1: waiting(2), 2: waiting(3)}
    assert stalemate(0, records) == [] and stalemate(1, records) == [1, 2] and stalemate(2, records) == [2, 1]


def test_the_error_names_ranks_collectives_calls_and_the_fix() -> None:
    same = {0: waiting(1), 1: waiting(2)}
    assert explain([1, 0], same).startswith(
        "ranks wait for each other: rank 0 for gather of unit '1' (forward after 2 steps), rank 1 for gather of unit '2' "
        "(forward after 2 steps). They take different ways through the model.")
    assert "shoal.zero.set_leaf_modules" in explain([0, 1], same)
    skipped = same | {1: waiting(2, call="backward after 2 steps")}
    assert "shoal.zero.set_leaf_modules" in explain([0, 1], skipped)
    stepping = {rank: waiting(rank + 1, call="step after 2 steps") for rank in (0, 1)}
    assert "shoal.zero.set_leaf_modules" in explain([0, 1], stepping), "a forward of a module, which names no call"
    setting = {rank: replace(record, what=f"reduce of unit '{rank}'") for rank, record in stepping.items()}
    assert "set it for the same parameters on every rank" in explain([0, 1], setting)
    other = same | {1: waiting(2, call="save_checkpoint after 2 steps")}
    assert "`with engine.join():`" in explain([0, 1], other)


def test_a_record_is_read_as_it_was_written() -> None:
    record = waiting(5, 2, t1=4)
    assert WaitRecord.loads(record.dumps()) == record
