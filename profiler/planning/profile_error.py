"""The error of a device or setting that cannot be profiled."""

from __future__ import annotations

from profiler.storage.strict import UserError


class ProfileError(UserError):
    """A device or setting that cannot be profiled; the message says why and what to do."""
