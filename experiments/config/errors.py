"""What a user can get wrong: one exception whose text is all they need to read."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration, or what it asks for, cannot be used; the message says what is allowed."""
