"""What long work tells those who wait for it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is to do."""
Say = Callable[[str], object]
"""Called with a line for the user."""


def silent(*_: object) -> None:
    """Tell nobody."""
