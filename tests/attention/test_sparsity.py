"""Layouts of every structure, written out by hand for small cases; their laws for any values; and what wrong values get."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.attention import Blocks, SparseSelfAttention
from shoal.attention.settings import SparseAttentionSettings, sparsity_config
from shoal.attention.sparsity import SparsityConfig, TensorSparsityConfig
from shoal.attention.structures import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    VariableSparsityConfig,
)
from shoal.errors import ConfigError, NotServed, ShoalError, UsageError

BLOCK = 4
UNI: Any = {"attention": "unidirectional"}


def drawn(layout: Tensor) -> str:
    """Return a layout of one head as text."""
    return "\n".join("".join(".#"[value] for value in row) for row in layout.tolist())


def text(lines: str) -> str:
    return "\n".join(lines.split())


CASES: dict[str, tuple[SparsityConfig, str]] = {
    "dense": (DenseSparsityConfig(2, BLOCK), "### ### ###"),
    "fixed": (FixedSparsityConfig(2, BLOCK, num_local_blocks=2),
              "##.#.# ##.#.# .###.# .###.# .#.### .#.###"),
    "fixed, later blocks unseen": (FixedSparsityConfig(2, BLOCK, num_local_blocks=2, **UNI),
                                   "#..... ##.... .##... .###.. .#.##. .#.###"),
    "fixed, horizontal": (FixedSparsityConfig(2, BLOCK, num_local_blocks=2, horizontal_global_attention=True),
                          "##.#.# ###### .###.# ###### .#.### ######"),
    "fixed, two global blocks": (FixedSparsityConfig(1, BLOCK, num_local_blocks=4, num_global_blocks=2),
                                 "####..## ####..## ####..## ####..## ..###### ..###### ..###### ..######"),
    "fixed, a short last window": (FixedSparsityConfig(2, BLOCK, num_local_blocks=3), "###.# ###.# ###.# ..### ..###"),
    "fixed, a short last window of later blocks unseen": (
        FixedSparsityConfig(2, BLOCK, num_local_blocks=3, num_different_global_patterns=1, **UNI),
        "#.... ##... ###.. ..##. ..###"),
    "variable": (VariableSparsityConfig(2, BLOCK, local_window_blocks=[1, 2], global_block_indices=[4, 9]),
                 "#...#. .##.#. .##.#. ...##. ...##. ....##"),
    "variable, later blocks unseen": (
        VariableSparsityConfig(2, BLOCK, local_window_blocks=[2, 3], global_block_indices=[1], **UNI),
        "#..... ##.... .##... .###.. .####. .#...#"),
    "variable, ranges, horizontal": (
        VariableSparsityConfig(2, BLOCK, local_window_blocks=[1], global_block_indices=[1, 4],
                               global_block_end_indices=[3, 9], horizontal_global_attention=True),
        "###.## ###### ###### .##### ###### ######"),
    "bigbird": (BigBirdSparsityConfig(2, BLOCK, num_random_blocks=0), "##### ###.. ####. #.### #..##"),
    "bigbird, later blocks unseen": (BigBirdSparsityConfig(2, BLOCK, num_random_blocks=0, **UNI),
                                     "#.... ##... ###.. #.##. #..##"),
    "longformer": (BSLongformerSparsityConfig(2, BLOCK, global_block_indices=[2]), "###.. ###.. ##### ..### ..###"),
    "longformer, ranges, later blocks unseen": (
        BSLongformerSparsityConfig(2, BLOCK, num_sliding_window_blocks=1, global_block_indices=[0, 3],
                                   global_block_end_indices=[2, 9], **UNI), "#.... ##... ###.. ####. #####"),
    "window": (LocalSlidingWindowSparsityConfig(2, BLOCK), "#.... ##... .##.. ..##. ...##"),
    "window to both sides": (LocalSlidingWindowSparsityConfig(2, BLOCK, 5, "bidirectional"),
                             "###.. ####. ##### .#### ..###"),
    "a tensor": (TensorSparsityConfig(torch.tensor([[[1, 0], [1, 1]]]), BLOCK), "#. ##"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_layout_is_the_one_written_by_hand(case: str) -> None:
    config, expected = CASES[case]
    blocks = len(expected.split())
    layout = config.make_layout(blocks * BLOCK)
    assert layout.dtype == torch.int64 and layout.shape == (config.num_heads, blocks, blocks)
    for head in layout:
        assert drawn(head) == text(expected)
    assert config.blocks(blocks * BLOCK) is Blocks.of(layout, BLOCK)


def test_heads_in_turn_have_other_global_blocks() -> None:
    config = FixedSparsityConfig(4, BLOCK, different_layout_per_head=True, num_local_blocks=4,
                                 num_different_global_patterns=3)
    layout = config.make_layout(8 * BLOCK)
    assert [[column for column in range(8) if bool(head[:, column].all())] for head in layout] == [
        [3, 7], [2, 6], [1, 5], [3, 7]]


def structures() -> st.SearchStrategy[SparsityConfig]:
    """Draw a structure that fits 12 blocks."""
    heads, either = st.integers(1, 3), st.sampled_from(["unidirectional", "bidirectional"])
    common = {"num_heads": heads, "block": st.just(BLOCK), "attention": either}
    differ = {"different_layout_per_head": st.booleans()}
    few = st.integers(0, 6)
    return st.one_of(
        st.builds(FixedSparsityConfig, **common, **differ, num_local_blocks=st.integers(1, 9)),
        st.builds(VariableSparsityConfig, **common, **differ, num_random_blocks=few,
                  local_window_blocks=st.lists(st.integers(1, 5), min_size=1),
                  global_block_indices=st.lists(st.integers(0, 20))),
        st.builds(BigBirdSparsityConfig, **common, **differ, num_random_blocks=st.integers(0, 1),
                  num_sliding_window_blocks=st.integers(1, 9), num_global_blocks=few),
        st.builds(BSLongformerSparsityConfig, **common, **differ, num_sliding_window_blocks=st.integers(1, 9),
                  global_block_indices=st.lists(st.integers(0, 20))),
        st.builds(LocalSlidingWindowSparsityConfig, **common, num_sliding_window_blocks=st.integers(1, 9)))


@given(structures())
@settings(max_examples=200, deadline=None)
def test_every_row_sees_itself_and_unidirectional_ones_see_nothing_later(config: Any) -> None:
    layout = config.make_layout(12 * BLOCK)
    assert bool(layout.diagonal(dim1=1, dim2=2).all()) and set(layout.unique().tolist()) <= {0, 1}
    if config.attention == "unidirectional":
        assert torch.equal(layout, layout.tril())
    if not config.different_layout_per_head:
        assert bool((layout == layout[:1]).all())
    assert torch.equal(config.blocks(12 * BLOCK).layout.expand(len(layout), -1, -1), layout.bool())


def random_structure(seed: int = 0, **values: Any) -> BigBirdSparsityConfig:
    return BigBirdSparsityConfig(2, BLOCK, num_random_blocks=2, num_sliding_window_blocks=1, num_global_blocks=0,
                                 **values).with_seed(seed)


def test_random_blocks_are_those_of_the_values_and_the_seed() -> None:
    layout = random_structure().make_layout(20 * BLOCK)
    assert torch.equal(layout, random_structure().make_layout(20 * BLOCK))
    assert not torch.equal(layout, random_structure(seed=1).make_layout(20 * BLOCK))
    assert set((layout.sum(-1)).flatten().tolist()) <= {2, 3}
    differing = random_structure(different_layout_per_head=True).make_layout(20 * BLOCK)
    assert not torch.equal(differing[0], differing[1])


@pytest.mark.parametrize("differ", [False, True])
def test_random_blocks_of_a_head_do_not_depend_on_the_number_of_heads(differ: bool) -> None:
    few, many = (BigBirdSparsityConfig(heads, BLOCK, differ).make_layout(20 * BLOCK) for heads in (2, 5))
    assert torch.equal(few, many[:2])


def test_random_blocks_are_cached_by_length_and_leave_random_unchanged() -> None:
    import random

    state = random.getstate()
    config = random_structure()
    assert config.blocks(20 * BLOCK) is config.blocks(20 * BLOCK)
    assert config.blocks(20 * BLOCK) is random_structure().blocks(20 * BLOCK)
    assert random.getstate() == state


def test_earlier_random_blocks_stay_as_a_unidirectional_sequence_grows() -> None:
    config = VariableSparsityConfig(1, BLOCK, num_random_blocks=2, **UNI)
    short, long = config.make_layout(10 * BLOCK), config.make_layout(20 * BLOCK)
    assert torch.equal(short, long[:, :10, :10])


@pytest.mark.parametrize("kind", [BigBirdSparsityConfig, VariableSparsityConfig])
def test_a_causal_model_draws_random_blocks_that_it_sees_and_keeps(kind: Any) -> None:
    config = kind(1, BLOCK, num_random_blocks=3)
    published, short, long = config.blocks(20 * BLOCK), *(config.blocks(n * BLOCK, causal=True).lower for n in (12, 20))
    assert torch.equal(short.layout, long.layout[:, :12, :12])
    assert torch.equal(published.layout.long(), config.make_layout(20 * BLOCK)[:1])
    plain = kind(1, BLOCK, num_random_blocks=0).blocks(20 * BLOCK).lower
    assert long.visited - plain.visited > published.lower.visited - plain.visited > 0


def test_changed_values_give_another_layout_of_the_same_length() -> None:
    config = FixedSparsityConfig(1, BLOCK, num_local_blocks=2)
    before = config.blocks(8 * BLOCK)
    config.num_local_blocks = 8
    assert config.blocks(8 * BLOCK).density == 1.0 and before.density < 1.0


class FromTable(SparsityConfig):
    """A structure that is read from a table of any length."""

    def __init__(self, table: Tensor) -> None:
        super().__init__(1, 16)
        self.table = table

    def make_layout(self, seq_len: int) -> Tensor:
        return self.setup_layout(seq_len) + self.table


def test_blocks_are_those_of_the_table_as_it_is_now() -> None:
    structure = FromTable(torch.eye(64, dtype=torch.int64))  # more entries than torch prints
    assert structure.blocks(1024).visited == 64
    structure.table[20] = 1
    assert structure.blocks(1024).visited == 127
    structure.table = torch.eye(64, dtype=torch.int64)
    assert structure.blocks(1024).visited == 64


class FromAnything(SparsityConfig):
    """A structure of global columns that it finds in an object, and visits the diagonal beside them."""

    def __init__(self, source: Any) -> None:
        super().__init__(1, 16)
        self.source = source
        self._private: list[int] = []

    def make_layout(self, seq_len: int) -> Tensor:
        layout = self.setup_layout(seq_len)
        layout[0].fill_diagonal_(1)
        layout[:, :, [*self.source(), *self._private]] = 1
        return layout

    def add_private(self, column: int) -> None:
        self._private.append(column)


def test_blocks_are_those_of_the_layout_as_it_is_now() -> None:
    columns = [0]
    structure = FromAnything(lambda: columns)
    assert structure.blocks(64).visited == 7
    columns.append(1)
    assert structure.blocks(64).visited == 10
    structure.add_private(2)
    assert structure.blocks(64).visited == 13
    assert structure.blocks(64) is structure.blocks(64)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_values_of_any_length_are_told_apart(kind: Any) -> None:
    structure: Any = BSLongformerSparsityConfig(1, 16)
    structure.global_block_indices = kind([5000] * 2000)  # more than an array or a tensor prints, past the end
    before = structure.blocks(64).visited
    structure.global_block_indices[1000] = 3
    assert structure.blocks(64).visited == before + 4


def test_numbers_of_one_size_draw_the_same_random_blocks() -> None:
    number: Any = np.int64(1)
    plain = BigBirdSparsityConfig(2, 16, num_random_blocks=1).make_layout(512)
    assert torch.equal(BigBirdSparsityConfig(2, 16, num_random_blocks=number).make_layout(512), plain)
    assert torch.equal(BigBirdSparsityConfig(2, 16, different_layout_per_head=0).make_layout(512), plain)  # type: ignore


def test_a_block_that_is_no_whole_number_is_refused_and_not_kept() -> None:
    layout = torch.ones(1, 3, 3)
    with pytest.raises(UsageError, match="a block is a whole number of positions"):
        Blocks.of(layout, 16.0)  # type: ignore
    assert type(Blocks.of(layout, np.int64(16)).block) is int  # type: ignore


def test_a_subclass_has_a_structure_of_its_own() -> None:
    class Diagonal(SparsityConfig):
        def make_layout(self, seq_len: int) -> Tensor:
            layout = self.setup_layout(seq_len)
            layout[0].fill_diagonal_(1)
            return self.check_and_propagate_first_head_layout(layout)

    class Corner(FixedSparsityConfig):
        def make_layout(self, seq_len: int) -> Tensor:
            layout = super().make_layout(seq_len)
            layout[:, 0, -1] = 1
            return layout

    assert torch.equal(Diagonal(3, BLOCK).blocks(4 * BLOCK).layout, torch.eye(4, dtype=torch.bool)[None])
    assert bool(Corner(1, BLOCK, num_local_blocks=1).blocks(4 * BLOCK).layout[0, 0, -1])


class Smaller(SparsityConfig):
    """A layout of one block less than there are."""

    def make_layout(self, seq_len: int) -> Tensor:
        return self.setup_layout(seq_len)[:, 1:, 1:]


class Given(SparsityConfig):
    """A structure whose layout is any object."""

    def __init__(self, layout: Any):
        super().__init__(2, BLOCK)
        self._layout = layout

    def make_layout(self, seq_len: int) -> Any:
        return self._layout


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a layout of one's own that is none": (lambda: Given(None).blocks(4 * BLOCK), UsageError,
                                           r"Given: the result of make_layout\(16\) is a tensor \(heads, blocks, blocks\), "
                                           r"here \(2, 4, 4\); got NoneType: give one"),
    "a layout of one's own that is an array": (lambda: Given(np.ones((2, 4, 4))).blocks(4 * BLOCK), UsageError,
                                               "got ndarray: give torch.as_tensor"),
    "a layout of one's own that is sparse": (lambda: Given(torch.ones(2, 4, 4).to_sparse()).blocks(4 * BLOCK), UsageError,
                                             "got one of torch.sparse_coo"),
    "a layout of one's own for a module": (lambda: SparseSelfAttention(Given(None), max_seq_length=4 * BLOCK), UsageError,
                                           "got NoneType"),
    "a list for a layout": (lambda: TensorSparsityConfig([[[1]]]), UsageError, "got list: give torch.as_tensor"),  # pyright: ignore
    "a switch of text": (lambda: FixedSparsityConfig(1, different_layout_per_head="false"), ValueError,  # pyright: ignore
                         "different_layout_per_head is true or false; got 'false'"),
    "another switch of text": (lambda: FixedSparsityConfig(1, horizontal_global_attention="no"), ValueError,  # pyright: ignore
                               "horizontal_global_attention is true or false; got 'no'"),
    "a seed of text": (lambda: BigBirdSparsityConfig(1).with_seed("1"), ValueError, "seed: got '1'; give a whole number"),  # pyright: ignore
    "no multiple": (lambda: DenseSparsityConfig(1).make_layout(100), ValueError, "multiple of the block, 16; pad .* to 112"),
    "a float length": (lambda: DenseSparsityConfig(1).make_layout(64.0), ValueError, "length 64.0; give a whole"),  # pyright: ignore
    "an array": (lambda: Blocks.of(np.ones((1, 4, 4)), BLOCK), UsageError, "got ndarray: give torch.as_tensor"),  # pyright: ignore
    "no length": (lambda: DenseSparsityConfig(1).setup_layout(0), ValueError, "length 0"),
    "no heads": (lambda: DenseSparsityConfig(0), ValueError, "num_heads: got 0"),
    "half a position": (lambda: DenseSparsityConfig(1, 2.5), ValueError, "block: got 2.5; give a whole number"),  # pyright: ignore
    "a block of text": (lambda: DenseSparsityConfig(1, "16"), ValueError, "block: got '16'"),  # pyright: ignore
    "one window": (lambda: VariableSparsityConfig(1, local_window_blocks=4), ValueError,  # pyright: ignore
                   r"local_window_blocks: got 4; give a list of whole numbers, such as \[4\]"),
    "one global block": (lambda: BSLongformerSparsityConfig(1, global_block_indices=0), ValueError,  # pyright: ignore
                         "global_block_indices: got 0; give a list"),
    "an end of text": (lambda: BSLongformerSparsityConfig(1, global_block_end_indices=["2"]), ValueError,  # pyright: ignore
                       "global_block_end_indices: got '2'"),
    "a layout of one's own of another shape": (lambda: Smaller(2, BLOCK).blocks(8 * BLOCK), UsageError,
                                               r"Smaller: make_layout\(32\) returned \(2, 7, 7\).*here \(2, 8, 8\)"),
    "no structure": (lambda: SparsityConfig(4).make_layout(16), NotImplementedError, "no structure of its own"),
    "fixed: no multiple of the global ones": (
        lambda: FixedSparsityConfig(1, num_local_blocks=4, num_global_blocks=3), ValueError, "num_local_blocks.*give 6"),
    "fixed: attention": (lambda: FixedSparsityConfig(1, attention="both"), NotImplementedError, "got 'both'; choose"),
    "fixed: horizontal": (lambda: FixedSparsityConfig(1, horizontal_global_attention=True, **UNI), ValueError, "horizontal"),
    "fixed: patterns of one layout": (
        lambda: FixedSparsityConfig(2, num_different_global_patterns=2), ValueError, "different_layout_per_head"),
    "fixed: too many patterns": (
        lambda: FixedSparsityConfig(2, different_layout_per_head=True, num_different_global_patterns=5), ValueError,
        "at most 4"),
    "fixed: too short": (
        lambda: FixedSparsityConfig(1, num_global_blocks=4).make_layout(32), ValueError, "got 4.*2 blocks"),
    "variable: ends": (lambda: VariableSparsityConfig(1, global_block_end_indices=[2, 3]), ValueError, "2 ends for 1"),
    "variable: an end before its start": (
        lambda: VariableSparsityConfig(1, global_block_indices=[3], global_block_end_indices=[3]), ValueError, "at least 4"),
    "variable: attention": (lambda: VariableSparsityConfig(1, attention="x"), NotImplementedError, "got 'x'"),
    "variable: horizontal": (
        lambda: VariableSparsityConfig(1, horizontal_global_attention=True, **UNI), ValueError, "horizontal"),
    "variable: too many random": (
        lambda: VariableSparsityConfig(1, num_random_blocks=3).make_layout(32), ValueError, "num_random_blocks: got 3"),
    "variable: no windows": (lambda: VariableSparsityConfig(1, local_window_blocks=[]), ValueError, "at least one"),
    "bigbird: attention": (lambda: BigBirdSparsityConfig(1, attention="x"), NotImplementedError, "got 'x'"),
    "bigbird: too many random": (
        lambda: BigBirdSparsityConfig(1, num_random_blocks=9).make_layout(128), ValueError, "num_random_blocks: got 9"),
    "bigbird: too wide a window": (
        lambda: BigBirdSparsityConfig(1).make_layout(32), ValueError, "num_sliding_window_blocks: got 3.*2 blocks"),
    "bigbird: too many global": (
        lambda: BigBirdSparsityConfig(1, num_global_blocks=9).make_layout(128), ValueError, "num_global_blocks: got 9"),
    "bigbird: fewer earlier blocks than random ones": (
        lambda: BigBirdSparsityConfig(1, num_random_blocks=2, **UNI).make_layout(128), ValueError, "one block to draw"),
    "longformer: ends": (lambda: BSLongformerSparsityConfig(1, global_block_end_indices=[]), ValueError, "0 ends for 1"),
    "longformer: an end before its start": (
        lambda: BSLongformerSparsityConfig(1, global_block_indices=[1], global_block_end_indices=[0]), ValueError,
        "at least 2"),
    "longformer: too wide a window": (
        lambda: BSLongformerSparsityConfig(1).make_layout(32), ValueError, "num_sliding_window_blocks"),
    "longformer: attention": (lambda: BSLongformerSparsityConfig(1, attention="x"), NotImplementedError, "got 'x'"),
    "window: too wide": (lambda: LocalSlidingWindowSparsityConfig(1).make_layout(32), ValueError, "num_sliding"),
    "a tensor of another length": (
        lambda: TensorSparsityConfig(torch.ones(1, 2, 2)).make_layout(64), ValueError, "the layout is for 32"),
    "a tensor that is no layout": (lambda: TensorSparsityConfig(torch.ones(2, 3)), ValueError, "heads, blocks, blocks"),
    "a section: mode": (lambda: sparsity_config({"mode": "bigfoot"}, 4), NotImplementedError, "choose dense, fixed"),
    "a section: a key of another mode": (
        lambda: sparsity_config({"mode": "fixed", "num_random_blocks": 2}, 4), ValueError, "choose variable or bigbird"),
    "a section: a wrong value": (lambda: sparsity_config({"num_local_blocks": 3, "num_global_blocks": 2}, 4), ValueError,
                                 "multiple of num_global_blocks"),
    "a section: unknown key": (lambda: sparsity_config({"num_local_block": 3}, 4), ValueError, "did you mean"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_gets_the_published_error_with_the_fix(case: str) -> None:
    call, kind, message = WRONG[case]
    with pytest.raises(kind, match=message) as raised:
        call()
    assert isinstance(raised.value, ShoalError)


SECTIONS: dict[str, tuple[dict[str, Any], SparsityConfig]] = {
    "none": ({}, FixedSparsityConfig(2)),
    "dense": ({"mode": "dense", "block": 32}, DenseSparsityConfig(2, 32)),
    "fixed": ({"mode": "fixed", "num_local_blocks": 8, "attention": "unidirectional"},
              FixedSparsityConfig(2, num_local_blocks=8, **UNI)),
    "variable": ({"mode": "variable", "local_window_blocks": [1, 2], "global_block_indices": [0], "num_random_blocks": 1,
                  "global_block_end_indices": [2], "seed": 3},
                 VariableSparsityConfig(2, num_random_blocks=1, local_window_blocks=[1, 2],
                                        global_block_end_indices=[2]).with_seed(3)),
    "bigbird": ({"mode": "BigBird", "num_random_blocks": 1}, BigBirdSparsityConfig(2)),
    "bslongformer": ({"mode": "bslongformer", "num_sliding_window_blocks": 5},
                     BSLongformerSparsityConfig(2, num_sliding_window_blocks=5)),
    "local_sliding_window": ({"mode": "local_sliding_window"}, LocalSlidingWindowSparsityConfig(2, 16, 3, "bidirectional")),
}  # fmt: skip


@pytest.mark.parametrize("case", SECTIONS)
def test_a_section_builds_the_structure_of_its_mode(case: str) -> None:
    section, expected = SECTIONS[case]
    found = sparsity_config(section, 2)
    assert repr(found) == repr(expected)
    assert torch.equal(found.make_layout(512), expected.make_layout(512))


def test_a_pickle_has_the_values_and_no_blocks() -> None:
    structure = TensorSparsityConfig(torch.ones(1, 8, 8), 16)
    before = pickle.dumps(structure)
    blocks = structure.blocks(128)
    assert len(pickle.dumps(structure)) == len(before)
    assert torch.equal(pickle.loads(before).blocks(128).layout, blocks.layout)


def test_a_missing_section_builds_nothing() -> None:
    with pytest.raises(NotServed, match="mode: got None"):
        sparsity_config(SparseAttentionSettings(), 2)


def test_a_configuration_error_is_of_both_families() -> None:
    assert issubclass(ConfigError, ValueError) and issubclass(NotServed, NotImplementedError)


def test_a_tensor_of_a_layout_is_read_once_and_again_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TensorSparsityConfig(torch.eye(4).expand(2, 4, 4), block=16)
    first = config.blocks(64)
    monkeypatch.setattr(Blocks, "of", None)
    assert config.blocks(64) is first
    monkeypatch.undo()
    config.layout[:, 3, 0] = 1
    assert config.blocks(64).columns.numel() == first.columns.numel() + 1
    assert pickle.loads(pickle.dumps(config)).blocks(64) is config.blocks(64)
