"""The exception for a user's mistake; its text is all that the user needs."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration, or a file that it names, is invalid; the message says what is allowed."""
