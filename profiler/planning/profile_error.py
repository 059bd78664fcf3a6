"""The error of a device or setting that cannot be profiled."""

from __future__ import annotations

from sarathi_sim.profiler.storage.strict import UserError


class ProfileError(UserError):
    """A device or setting that cannot be profiled; the message says why and what to do."""
