"""An instruction prints and parses as `2F0`, and its dependencies are those of backpropagation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.pipeline.instruction import Instruction, Op

counts = st.integers(min_value=0, max_value=10_000)


@given(counts, st.sampled_from(Op), counts)
def test_an_instruction_parses_back_from_its_text(stage: int, kind: Op, microbatch: int) -> None:
    instruction = Instruction(stage, kind, microbatch)
    assert Instruction.parse(str(instruction)) == instruction


def test_the_text_is_stage_kind_and_microbatch() -> None:
    assert str(Instruction(2, Op.FORWARD, 0)) == "2F0"
    assert [Instruction.parse(text).kind for text in ("0F1", "0B1", "0I1", "0W1")] == list(Op)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 ", "2F0\n", "2F1.5", "²F0"])
def test_text_that_is_no_instruction_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        Instruction.parse(text)
    assert str(refused.value) == f"instruction: got {text!r}; write stage, one of F, B, I, W, microbatch, such as 2F0"


@pytest.mark.parametrize(("text", "needs"), [
    ("0F5", []), ("1F5", ["0F5"]), ("2F5", ["1F5"]),
    ("2B5", ["2F5"]), ("1B5", ["1F5", "2I5"]), ("0I5", ["0F5", "1I5"]), ("2I5", ["2F5"]), ("1W5", ["1I5"]),
])  # fmt: skip
def test_forward_depends_on_the_stage_before_backward_on_the_one_after(text: str, needs: list[str]) -> None:
    assert list(map(str, Instruction.parse(text).dependencies(3))) == needs


def test_a_whole_backward_completes_its_input_and_weight_parts() -> None:
    assert list(map(str, Instruction.parse("1B5").completes())) == ["1I5", "1W5"]
    assert list(map(str, Instruction.parse("1I5").completes())) == ["1I5"]


def test_instructions_sort_by_stage_kind_and_microbatch() -> None:
    assert sorted(map(Instruction.parse, ["1F0", "0F1", "0F0"])) == list(map(Instruction.parse, ["0F0", "0F1", "1F0"]))
