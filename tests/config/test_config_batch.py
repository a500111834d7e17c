"""Total batch = microbatch x accumulation x data ranks; two settings give the third, and errors show the arithmetic."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.config.batch import BatchSizes, DataRanks, solve
from shoal.errors import ConfigError

SIZES = st.integers(1, 64)
TWO = DataRanks(count=2, origin="WORLD_SIZE of torchrun")


@given(micro=SIZES, accumulation=SIZES, count=SIZES)
def test_any_two_settings_give_the_third(micro: int, accumulation: int, count: int) -> None:
    ranks = DataRanks(count=count, origin="a test")
    sizes = BatchSizes(micro=micro, accumulation=accumulation, data_ranks=count)
    assert sizes.total == micro * accumulation * count
    assert solve(sizes.total, micro, None, ranks) == sizes
    assert solve(sizes.total, None, accumulation, ranks) == sizes
    assert solve(None, micro, accumulation, ranks) == sizes
    assert solve(sizes.total, micro, accumulation, ranks) == sizes


@given(micro=SIZES, count=SIZES)
def test_one_setting_alone_means_no_accumulation(micro: int, count: int) -> None:
    ranks = DataRanks(count=count, origin="a test")
    sizes = BatchSizes(micro=micro, accumulation=1, data_ranks=count)
    assert solve(None, micro, None, ranks) == sizes
    assert solve(sizes.total, None, None, ranks) == sizes


@given(total=st.none() | SIZES, micro=st.none() | SIZES, accumulation=st.none() | SIZES, count=SIZES)
def test_given_settings_are_kept_or_rejected(
    total: int | None, micro: int | None, accumulation: int | None, count: int
) -> None:
    try:
        sizes = solve(total, micro, accumulation, DataRanks(count=count, origin="a test"))
    except ConfigError:
        assume(False)
        return
    assert total in (None, sizes.total)
    assert micro in (None, sizes.micro)
    assert accumulation in (None, sizes.accumulation)
    assert min(sizes.micro, sizes.accumulation) >= 1


@given(total=st.integers(1, 500), micro=SIZES, count=SIZES)
def test_a_total_that_does_not_divide_gives_choices_that_do(total: int, micro: int, count: int) -> None:
    ranks = DataRanks(count=count, origin="a test")
    if total % (micro * count) == 0:
        assert solve(total, micro, None, ranks).total == total
        return
    with pytest.raises(ConfigError) as raised:
        solve(total, micro, None, ranks)
    choices = re.search(r"choose (\d+)(?: or (\d+))?, or", str(raised.value))
    assert choices is not None
    for choice in filter(None, choices.groups()):
        assert solve(int(choice), micro, None, ranks).total == int(choice)


@pytest.mark.parametrize(
    ("given_sizes", "message"),
    [
        ((None, None, None), "train_batch_size: missing; give train_batch_size or train_micro_batch_size_per_gpu"),
        (
            (None, None, 4),
            "train_batch_size: missing; give train_batch_size or train_micro_batch_size_per_gpu "
            "(gradient_accumulation_steps alone counts no samples)",
        ),
        (
            (7, None, None),
            "train_batch_size: got 7, not a multiple of 2 data ranks (data ranks: WORLD_SIZE of torchrun); "
            "choose 6 or 8, or change a factor",
        ),
        (
            (30, 4, None),
            "train_batch_size: got 30, not a multiple of train_micro_batch_size_per_gpu 4 x 2 data ranks = 8 "
            "(data ranks: WORLD_SIZE of torchrun); choose 24 or 32, or change a factor",
        ),
        (
            (3, None, 4),
            "train_batch_size: got 3, not a multiple of gradient_accumulation_steps 4 x 2 data ranks = 8 "
            "(data ranks: WORLD_SIZE of torchrun); choose 8, or change a factor",
        ),
        (
            (32, 4, 3),
            "train_batch_size: got 32, but train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 3 "
            "x 2 data ranks = 24 (data ranks: WORLD_SIZE of torchrun); "
            "give train_batch_size 24, or gradient_accumulation_steps 4, or only two of the three",
        ),
        (
            (33, 4, 3),
            "train_batch_size: got 33, but train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 3 "
            "x 2 data ranks = 24 (data ranks: WORLD_SIZE of torchrun); "
            "give train_batch_size 24, or only two of the three",
        ),
    ],
)
def test_an_impossible_batch_error_shows_the_arithmetic(
    given_sizes: tuple[int | None, int | None, int | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        solve(*given_sizes, TWO)
