"""Prompts that share their beginning: system prompts, and the turns of a session.

A :data:`~sarathi_sim.policies.request.Prefix` names the shared part. Only its length matters, not
its words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sarathi_sim.policies.request import Prefix
from sarathi_sim.simulator.loop.records import Ints


def draw_groups(count: int, shares: Sequence[float], rng: np.random.Generator) -> Ints:
    """The group of each of ``count`` requests: 0 for the first share of all, and so on, else -1."""
    group = np.searchsorted(np.cumsum(shares), rng.random(count), side="right")
    return np.where(group < len(shares), group, -1)


def draw_sessions(count: int, low: int, high: int, rng: np.random.Generator) -> Ints:
    """The session of each of ``count`` requests, in order: 0, 0, 0, 1, 1, ...

    A session has ``low`` to ``high`` turns, each number as likely; the last one may be cut short.
    """
    ends = np.cumsum(rng.integers(low, high, size=count, endpoint=True, dtype=np.int64))
    return np.searchsorted(ends, np.arange(count), side="right")


def with_turns_before(session: Ints, prompt: Ints, output: Ints) -> Ints:
    """Prompt tokens of every turn, which hold its session's earlier prompts and answers.

    ``prompt`` and ``output`` are the tokens that a turn adds.
    """
    total = prompt + output
    before = np.cumsum(total) - total
    return np.asarray(prompt + before - before[np.searchsorted(session, session)], np.int64)


def shared_prefixes(
    system_tokens: Sequence[int], group: Ints | None, session: Ints | None, length: Ints
) -> list[Prefix]:
    """The shared prefix of each request.

    That is the system prompt of its ``group``, and with the other turns of its ``session`` all
    that is in the KV cache when it is done: ``length`` (prompt and output) less the last token.
    """
    systems = [((("system prompt", i), tokens),) for i, tokens in enumerate(system_tokens)]
    heads = [()] * len(length) if group is None else [systems[i] if i >= 0 else () for i in group]
    if session is None:
        return list(heads)
    until = (length - 1).tolist()
    return [
        (*head, (("session", turn), until[i]))
        for i, (head, turn) in enumerate(zip(heads, session.tolist(), strict=True))
    ]
