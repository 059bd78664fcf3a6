"""A clock in place of the module ``time``, on which only sleeping takes any."""

from __future__ import annotations

from types import SimpleNamespace


def only_sleep_takes_time() -> SimpleNamespace:
    """``now``, in seconds, and the functions ``perf_counter`` and ``sleep``."""
    fake = SimpleNamespace(now=0.0, perf_counter=lambda: fake.now)
    fake.sleep = lambda seconds: setattr(fake, "now", fake.now + seconds)
    return fake
