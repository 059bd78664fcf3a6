"""The integers that schedulers log, and the errors that end a run.

A *span* is a run of consecutive iterations of one slot in which a request took part in one role.
"""

from __future__ import annotations

from struct import Struct

PREFILL, DECODE, PADDING, RECOMPUTE, PART = 0, 1, 2, 3, 4
"""The role of a request in a span. RECOMPUTE: it computes lost tokens again, up to its next token.
PART: chunks that end with no token, because they did not go on in the slot's next iteration."""

HIT, HIT_AGAIN, LOST, REMOTE = 0, 1, 2, 3
"""Tokens found in the prefix cache at a first admission and at a later one, lost by preemption
(negative: taken back, as drafts that did not hold, or where the request ended before it was
admitted again), or whose KV was computed elsewhere."""

DRAFTED, ACCEPTED = 4, 5
"""Drafts of a request that were verified, and those of them that held."""

span = Struct("5q").pack
"""A row of the log ``spans``: request, role, slot, first and last iteration."""


class PolicyError(Exception):
    """A policy returned an invalid plan."""


class LivelockError(Exception):
    """The schedule makes no progress: sequences preempt each other for ever, for example."""
