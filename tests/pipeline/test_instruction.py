"""An instruction prints and parses as `2F0`, and what it needs is the law of backpropagation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.pipeline.instruction import Instruction, Op

counts = st.integers(min_value=0, max_value=10_000)


@given(counts, st.sampled_from(Op), counts)
def test_an_instruction_reads_back_as_it_was_written(stage: int, kind: Op, microbatch: int) -> None:
    instruction = Instruction(stage, kind, microbatch)
    assert Instruction.parse(str(instruction)) == instruction


def test_it_is_written_as_stage_kind_and_microbatch() -> None:
    assert str(Instruction(2, Op.FORWARD, 0)) == "2F0"
    assert [Instruction.parse(text).kind for text in ("0F1", "0B1", "0I1", "0W1")] == list(Op)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 ", "2F0\n", "2F1.5", "²F0"])
def test_what_is_no_instruction_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        Instruction.parse(text)
    assert str(refused.value) == f"instruction: got {text!r}; write stage, one of F, B, I, W, microbatch, such as 2F0"


@pytest.mark.parametrize(("text", "needs"), [
    ("0F5", []), ("1F5", ["0F5"]), ("2F5", ["1F5"]),
    ("2B5", ["2F5"]), ("1B5", ["1F5", "2I5"]), ("0I5", ["0F5", "1I5"]), ("2I5", ["2F5"]), ("1W5", ["1I5"]),
])  # fmt: skip
def test_forward_needs_the_stage_before_and_backward_the_stage_after(text: str, needs: list[str]) -> None:
    assert list(map(str, Instruction.parse(text).needs(3))) == needs


def test_a_whole_backward_is_its_two_halves() -> None:
    assert list(map(str, Instruction.parse("1B5").halves())) == ["1I5", "1W5"]
    assert list(map(str, Instruction.parse("1I5").halves())) == ["1I5"]


def test_instructions_have_an_order() -> None:
    assert sorted(map(Instruction.parse, ["1F0", "0F1", "0F0"])) == list(map(Instruction.parse, ["0F0", "0F1", "1F0"]))
