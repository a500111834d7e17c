"""Parts of a span that stay in memory for their next use, though nobody uses them now."""

from __future__ import annotations

from shoal.tier.span import Span

__all__ = ["ResidencyPin"]


class ResidencyPin:
    """What stays of `span`; true while anything does."""

    def __init__(self, span: Span):
        self._span = span
        self._parts: list[range] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    def keep(self, part: range) -> None:
        """Let the elements `part`, which are in memory, stay when their user commits them."""
        self._parts.append(part)
        self._span.fetch(part.start, part.stop)

    def let_go(self) -> None:
        """Let nothing stay: whoever uses it fetches it, or nobody does."""
        while self._parts:
            part = self._parts.pop()
            self._span.commit(part.start, part.stop, changed=False)
