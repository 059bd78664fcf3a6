"""The error of a device or setting that cannot be profiled."""

from __future__ import annotations


class ProfileError(ValueError):
    """A device or setting that cannot be profiled; the message says why and what to do."""
