"""A workload in numbers: rates, burstiness, lengths, and the shared part of its prompts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from sarathi_sim.policies.request import Request
from ..loop.records import Floats, Ints

BLOCK_TOKENS = 16
"""Tokens of a KV block, of which only whole ones are shared (vLLM's default)."""
WINDOW_S = 60.0
_PERCENTILES = (50, 90, 99)


def describe_workload(requests: Sequence[Request], clients: int | None = None) -> dict[str, Any]:
    """A workload in numbers.

    ``requests``, ``users``; the ``clients`` of a closed loop; ``prompt_tokens``, ``output_tokens``
    and ``total_tokens``: each ``mean``, ``p50``, ``p90``, ``p99``, ``max`` and ``sum``;
    ``pd_ratio``: prompt over output tokens; ``duration_s`` from the first to the last arrival,
    ``rate`` (requests a second over it), ``peak_rate`` (over the busiest 60 s, or all of a shorter
    workload), ``gap_cv`` (standard deviation of the gaps between arrivals over their mean; 1 for
    Poisson arrivals): None where all arrive at once, or clients send them; ``shared``: the share of
    prompt tokens that a prefix cache without a limit would find, in blocks of 16 tokens.
    """
    arrival_s = np.sort([request.arrival_s for request in requests])
    prompt = np.array([request.prompt_tokens for request in requests])
    output = np.array([request.output_tokens for request in requests])
    duration_s = float(arrival_s[-1] - arrival_s[0])
    spread = duration_s > 0
    gaps = np.diff(arrival_s)
    return {
        "requests": len(requests),
        "users": len({request.user for request in requests}),
        "clients": clients,
        "prompt_tokens": _lengths(prompt),
        "output_tokens": _lengths(output),
        "total_tokens": _lengths(prompt + output),
        "pd_ratio": float(prompt.sum() / output.sum()),
        "duration_s": duration_s,
        "rate": len(gaps) / duration_s if spread else None,
        "peak_rate": peak_rate(arrival_s) if spread else None,
        "gap_cv": float(gaps.std() / gaps.mean()) if spread else None,
        "shared": shared_tokens(requests) / int(prompt.sum()),
    }


def traffic_line(requests: Sequence[Request]) -> str:
    """Mean, P50 and P99 of prompts and outputs, in words, printed beside every answer."""
    return lengths_line(
        np.array([request.prompt_tokens for request in requests]),
        np.array([request.output_tokens for request in requests]),
    )


def lengths_line(prompt: Ints, output: Ints) -> str:
    """The line of :func:`traffic_line`, of prompt and output tokens."""
    words = list[str]()
    for what, each in (("prompts", prompt), ("outputs", output)):
        found = (each.mean(), *np.percentile(each, (50, 99)))
        mean, middle, most = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in found)
        words.append(f"{what}: mean {mean}, P50 {middle}, P99 {most}")
    return f"{words[0]} tokens; {words[1]}"


def without_times(clients: int | None) -> str:
    """In words, when requests without arrival times are sent."""
    if clients is None:
        return "all arrive at once"
    return f"{clients:,} at a time: a client sends its next request when it has its answer"


def _lengths(tokens: Ints) -> dict[str, float]:
    percentiles = zip(_PERCENTILES, np.percentile(tokens, _PERCENTILES), strict=True)
    return {
        "mean": float(tokens.mean()),
        **{f"p{share}": float(value) for share, value in percentiles},
        "max": int(tokens.max()),
        "sum": int(tokens.sum()),
    }


def peak_rate(arrival_s: Floats) -> float:
    """Requests a second in the busiest window of 60 s that begins with an arrival, or over all of
    a shorter workload. ``arrival_s`` is sorted."""
    window = min(WINDOW_S, float(arrival_s[-1] - arrival_s[0]))
    ends = np.searchsorted(arrival_s, arrival_s + window, side="right")
    return float((ends - np.arange(len(arrival_s))).max() / window)


def shared_tokens(requests: Iterable[Request]) -> int:
    """Prompt tokens that a prefix cache of unlimited size would find, left by earlier requests.

    Whole blocks only, and never the last token of a prompt.
    """
    cached: dict[Hashable, int] = {}
    found = 0
    for request in sorted(requests, key=lambda request: request.arrival_s):
        here = 0
        for name, until in request.prefix:
            if name in cached:
                here = min(until, cached[name])
            cached[name] = max(until, cached.get(name, 0))
        found += min(here, request.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return found
