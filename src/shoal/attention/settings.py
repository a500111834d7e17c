"""The `sparse_attention` section: a structure by its mode, with the numbers of that structure.

    {"mode": "bigbird", "block": 64, "num_random_blocks": 1}     ->     BigBirdSparsityConfig(heads, block=64, ...)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator

from shoal.attention.sparsity import SparsityConfig
from shoal.attention.structures import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    VariableSparsityConfig,
)
from shoal.config.problem import raise_all, shown
from shoal.config.published import is_auto
from shoal.config.resolve import resolve
from shoal.config.section import Conflict, Count, Positive, Rewritten, Section, Switch, any_case
from shoal.errors import ConfigError, NotServed, UnknownKind

__all__ = ["MODES", "SparseAttentionSettings", "Structure", "sparsity_config"]


@dataclass(frozen=True, slots=True)
class Structure:
    """A mode: the class of its configuration, and the keys that this takes beside `block`."""

    kind: type[SparsityConfig]
    keys: tuple[str, ...]
    published: bool = True


_HEADS, _RANGES = "different_layout_per_head", ("global_block_indices", "global_block_end_indices")

MODES: Mapping[str, Structure] = MappingProxyType({
    "dense": Structure(DenseSparsityConfig, ()),
    "fixed": Structure(FixedSparsityConfig, (
        _HEADS, "num_local_blocks", "num_global_blocks", "attention", "horizontal_global_attention",
        "num_different_global_patterns")),
    "variable": Structure(VariableSparsityConfig, (
        _HEADS, "num_random_blocks", "local_window_blocks", *_RANGES, "attention", "horizontal_global_attention")),
    "bigbird": Structure(BigBirdSparsityConfig, (
        _HEADS, "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks", "attention")),
    "bslongformer": Structure(BSLongformerSparsityConfig, (
        _HEADS, "num_sliding_window_blocks", *_RANGES, "attention")),
    "local_sliding_window": Structure(LocalSlidingWindowSparsityConfig, (
        "num_sliding_window_blocks", "attention"), published=False),
})
"""The structures by their mode."""

_Mode = Annotated[Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"],
                  BeforeValidator(any_case(*MODES))]
_SHARED = ("mode", "block", "seed")
_ATTENTIONS = ("bidirectional", "unidirectional")


class SparseAttentionSettings(Section):
    """Block-sparse attention. `initialize` gives it to a model of Hugging Face transformers; other models build their layers
    from it with `shoal.attention.sparsity_config`."""

    mode: _Mode | None = None
    """The structure: dense, fixed, variable, bigbird, bslongformer or (Shoal only) local_sliding_window; a section without
    it: fixed. null: the attention of the model as it is."""

    block: Positive = 16
    """Positions along an edge of a block; multiples of 16 run natively."""

    different_layout_per_head: Switch = False
    """Let heads have different layouts."""

    num_local_blocks: Positive = 4
    """fixed: the blocks of a window."""

    num_global_blocks: Count = 1
    """fixed: global blocks of each window; bigbird: global blocks at the start."""

    attention: Literal["bidirectional", "unidirectional"] = "bidirectional"
    """All modes but dense: see later blocks, or only earlier ones. Causal models see no later position in any case."""

    horizontal_global_attention: Switch = False
    """fixed, variable: let global blocks see everything."""

    num_different_global_patterns: Positive = 1
    """fixed: heads in turn take different global blocks of a window; needs `different_layout_per_head`."""

    num_random_blocks: Count = 0
    """variable, bigbird: random blocks of each row."""

    local_window_blocks: tuple[Positive, ...] = (4,)
    """variable: the sizes of the windows in turn, of which the last repeats."""

    global_block_indices: tuple[Count, ...] = (0,)
    """variable, bslongformer: global blocks, or the starts of ranges of them."""

    global_block_end_indices: tuple[Count, ...] | None = None
    """variable, bslongformer: the ends of these ranges, which are not part of them."""

    num_sliding_window_blocks: Positive = 3
    """bigbird, bslongformer, local_sliding_window: the blocks of the window around each row."""

    seed: Count = 0
    """The seed of random blocks. (Shoal only.)"""

    @classmethod
    def rewrite(cls, given: dict[str, object]) -> Rewritten:
        values, conflicts = {"mode": "fixed", **given}, list[Conflict]()
        for name, kinds, spelling in (("mode", tuple(MODES), str.lower), ("attention", _ATTENTIONS, str)):
            value = values.get(name, kinds[0])
            off = is_auto(value) or (value is None and name == "mode")
            if not off and not (isinstance(value, str) and spelling(value) in kinds):
                del values[name]
                conflicts.append(Conflict(keys=(name,), message=f"got {shown(value)}; choose {', '.join(kinds)}",
                                          kind=UnknownKind))
        origins = {} if "mode" in given else {"mode": "the section is present"}
        return Rewritten(values=values, origins=origins, conflicts=tuple(conflicts))

    def conflicts(self) -> Iterable[Conflict]:
        used = {*_SHARED, *(MODES[self.mode].keys if self.mode else ())}
        for name, field in type(self).model_fields.items():
            if name not in used and getattr(self, name) != field.default:
                modes = [mode for mode, structure in MODES.items() if name in structure.keys]
                yield Conflict(keys=(name, "mode"), message=f"has no effect with mode {self.mode!r}; remove it, or choose "
                                                            f"{' or '.join(modes)}")
        if self.mode is not None:
            try:
                _build(self, 1).check_rows()
            except (ConfigError, NotServed) as error:
                yield Conflict(keys=("mode",), message=str(error))


def sparsity_config(section: SparseAttentionSettings | Mapping[str, Any], heads: int) -> SparsityConfig:
    """Return the structure of `section`, the JSON object or its settings, for `heads` heads.

    Raises UnknownKind (a NotImplementedError and a ConfigError) for an unknown mode or attention, NotServed for a section
    that has none, ConfigError (a ValueError) for other wrong values.
    """
    settings = section if isinstance(section, SparseAttentionSettings) else _resolved(section)
    if settings.mode is None:
        raise NotServed(f"sparse_attention.mode: got None; choose {', '.join(MODES)}")
    return _build(settings, heads)


def _resolved(section: object) -> SparseAttentionSettings:
    if not isinstance(section, Mapping):
        raise ConfigError(f"sparse_attention: got {section!r}; give the JSON object, such as {{'mode': 'bigbird'}}")
    found = resolve(SparseAttentionSettings, cast("Mapping[str, Any]", section))
    raise_all(found.findings.problems, "sparse_attention")
    return found.section


def _build(section: SparseAttentionSettings, heads: int) -> SparsityConfig:
    assert section.mode is not None
    structure = MODES[section.mode]
    return structure.kind(heads, block=section.block, **{key: getattr(section, key) for key in structure.keys}).with_seed(
        section.seed)
