"""Where scales and signs lie in a packed vector, the same for everybody who reads or writes one.

    bytes   0          4 blocks                  + elements / 8      to a multiple of 16
            | scales     | signs                   | zeros |
            | fp32, one  | a bit an element:       |
            | a block    | bit i % 8 of byte i / 8 |

A block is BLOCK elements, the last one what is left. The host's byte order is used, little-endian wherever torch runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "BLOCK", "GRAIN", "Parts", "blocks", "is_finite", "packed_bytes", "parts"]

BLOCK = 2048
"""Elements that share a scale: 256 bytes of signs to 4 of scale, 1.016 bits an element; 8 KiB of fp32, which stay in L1."""

GRAIN = 16
"""A packed vector has a multiple of so many elements, so that signs are whole bytes and no vector of them has a tail."""

ALIGNMENT = 16
"""Bytes of which the size of a packed vector is a multiple: several, one after the other, have aligned scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Views of a packed vector: `scales` (blocks,) fp32, `signs` (elements / 8,) uint8, `padding` uint8."""

    scales: Tensor
    signs: Tensor
    padding: Tensor


def blocks(elements: int) -> int:
    """Return the number of blocks begun."""
    return -(-elements // BLOCK)


def packed_bytes(elements: int) -> int:
    """Return the bytes of a packed vector of `elements`, a multiple of GRAIN."""
    assert elements % GRAIN == 0, f"{elements} elements are no multiple of {GRAIN}"
    return -(-(4 * blocks(elements) + elements // 8) // ALIGNMENT) * ALIGNMENT


def parts(packed: Tensor, elements: int) -> Parts:
    """Return views of the parts of `packed` (packed_bytes(elements),) uint8."""
    head, bits = 4 * blocks(elements), elements // 8
    return Parts(scales=packed[:head].view(torch.float32), signs=packed[head : head + bits], padding=packed[head + bits :])


def is_finite(packed: Tensor, elements: int) -> bool:
    """Return whether no block of the vector held an Inf or NaN; reads the scales alone (and waits for a device)."""
    return bool(torch.isfinite(parts(packed, elements).scales).all())
