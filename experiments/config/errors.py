"""The exception for a user's mistake; its text is all that the user needs.

It is the base of all such errors, so errors of lower rooms need no translation.
"""

from __future__ import annotations

from sarathi_sim.profiler.storage.strict import UserError as ConfigError

__all__ = ["ConfigError"]
