"""Progress: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def progress() -> Generator[Callable[[str], None], None, None]:
    """Yield a function that shows what is being measured now."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(text, highlight=False)
        return
    with console.status("starting") as status:
        yield status.update
