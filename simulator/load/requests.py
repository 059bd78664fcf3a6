"""Requests: their lengths and arrivals, from distributions or from a trace, their shared prefixes,
and the same requests shifted.

:func:`make_requests` joins lengths and arrivals. Every random choice has a stream of its own, keyed
by its use, so a new use does not change the others. A
:data:`~sarathi_sim.policies.request.Prefix` names a shared prefix: a system prompt, or the turns of
a session. Only its length matters, not its words.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sarathi_sim.policies.request import Prefix, Request
from ..loop.records import Floats, Ints


class WorkloadError(ValueError):
    """A workload cannot be made; the message says why."""


def stream(seed: int, use: str) -> np.random.Generator:
    """The random stream for one use, such as ``"lengths"``, independent of other streams."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *use.encode()])))


# Lengths -------------------------------------------------------------------------------------


def zipf_probabilities(count: int, theta: float) -> Floats:
    """Probability of rank 1 to ``count``: p(k) = k ** -theta / sum of j ** -theta."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -theta
    probabilities: Floats = weights / weights.sum()
    return probabilities


def zipf_lengths(
    count: int, theta: float, low: int, high: int, step: int, rng: np.random.Generator
) -> Ints:
    """Total tokens of ``count`` requests; the k-th of ``low, low + step, ...`` up to ``high`` has
    p ~ k ** -theta. ``step`` 1 is every token count, 1024 the classes 1K, 2K, ...
    """
    values = np.arange(low, high + 1, step, dtype=np.int64)
    cumulative = np.cumsum(zipf_probabilities(len(values), theta))
    rank = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
    return np.asarray(values[np.minimum(rank, len(values) - 1)], np.int64)


def uniform_lengths(count: int, low: int, high: int, rng: np.random.Generator) -> Ints:
    """Total tokens of ``count`` requests, each whole number in [low, high] as likely."""
    return rng.integers(low, high, size=count, dtype=np.int64, endpoint=True)


def quantile_lengths(
    count: int, tokens_by_percent: Mapping[float, float], rng: np.random.Generator
) -> Ints:
    """Tokens of ``count`` requests by their percentiles, linear between those given."""
    percents = sorted(tokens_by_percent)
    tokens = [tokens_by_percent[percent] for percent in percents]
    drawn: Floats = np.interp(100 * rng.random(count), percents, tokens)
    return np.asarray(np.maximum(1, np.rint(drawn)), np.int64)


def log_uniform(count: int, low: float, high: float, rng: np.random.Generator) -> Floats:
    """``count`` numbers from ``low`` to ``high``, spread evenly over their logarithm."""
    found: Floats = low * (high / low) ** rng.random(count)
    return found


def split_lengths(total: npt.ArrayLike, pd_ratio: float | Floats) -> tuple[Ints, Ints]:
    """(prompt, output) tokens with prompt : output about ``pd_ratio``, both at least 1.
    ``pd_ratio`` is one number for all requests, or one for each.

    output = max(1, floor(total / (pd_ratio + 1))), prompt = total - output. Raises WorkloadError
    where a total is too short to split.
    """
    totals = np.asarray(total, np.int64)
    output = np.maximum(1, np.floor(totals / (pd_ratio + 1)).astype(np.int64))
    prompt = totals - output
    if (prompt < 1).any():
        raise WorkloadError(
            f"a request of {int(totals.min())} tokens cannot be split into a prompt and an output "
            f"at P:D {np.min(pd_ratio):g}"
        )
    return prompt, output


# Arrivals ------------------------------------------------------------------------------------


def at_once(count: int) -> Floats:
    """Everything arrives at t = 0."""
    return np.zeros(count)


def gamma_arrivals(count: int, rate: float, cv: float, rng: np.random.Generator) -> Floats:
    """Arrival times in seconds; gaps are gamma distributed with mean 1/rate and coefficient of
    variation ``cv``. The first gap counts, so the first arrival is not at 0.
    """
    shape = cv**-2
    return np.cumsum(rng.gamma(shape, 1 / (rate * shape), count))


def poisson_arrivals(count: int, rate: float, rng: np.random.Generator) -> Floats:
    """Arrival times in seconds of a Poisson process of ``rate`` requests a second."""
    return np.cumsum(rng.exponential(1 / rate, count))


def varying_arrivals(
    count: int, at_s: Floats, rate: Floats, repeat: bool, rng: np.random.Generator
) -> Floats:
    """Arrival times in seconds of a Poisson process whose rate varies.

    The rate is linear between the points ``rate`` at ``at_s`` (seconds, not falling; two equal
    times are a jump), and constant before and after them; with ``repeat`` it starts again after
    the last. Arrivals of rate 1 are mapped by the inverse of the rate's integral, which is exact.
    """
    if not repeat and at_s[0] > 0:
        at_s, rate = np.array([0.0, *at_s]), np.array([rate[0], *rate])
    spans = np.diff(at_s)
    ends = np.concatenate([[0.0], np.cumsum(spans * (rate[:-1] + rate[1:]) / 2)])
    events = np.cumsum(rng.exponential(1.0, count))
    rounds = np.zeros(count)
    if repeat:
        rounds, events = np.floor(events / ends[-1]), events % ends[-1]
    segment = np.minimum(np.searchsorted(ends, events, side="right") - 1, len(at_s) - 1)
    slope = np.append(
        np.divide(
            np.diff(rate),
            spans,
            out=np.zeros_like(spans),
            where=spans > 0,
        ),
        0,
    )
    left, low = events - ends[segment], rate[segment]
    # The root of low t + slope t^2 / 2 = left, in the form without cancellation.
    root = np.sqrt(np.maximum(low**2 + 2 * slope[segment] * left, 0.0))
    within = 2 * left / np.maximum(low + root, 1e-300)
    start = at_s[segment] - (at_s[0] if repeat else 0.0)
    period = at_s[-1] - at_s[0]
    return np.asarray(rounds * period + start + within)


# Requests ------------------------------------------------------------------------------------


def make_requests(
    arrival_s: Floats,
    prompt: Ints,
    output: Ints,
    *,
    max_length: int,
    declare_exact: bool = False,
    user: Ints | None = None,
    prefix: list[Prefix] | None = None,
) -> list[Request]:
    """Requests 0, 1, ... in the order of the arrays.

    A request declares that it may fill ``max_length``, or its true output length
    (``declare_exact``). A request longer than ``max_length`` declares its length, so the scheduler
    rejects it. Without ``user`` all requests belong to user 0. ``prefix`` is each request's shared
    prefix (None: none).
    """
    declared = output if declare_exact else np.maximum(output, max_length - prompt)
    # Equal lengths are one object: a million requests take 80 MB less.
    one: dict[int, int] = {}
    p, o, d = ([one.setdefault(n, n) for n in c.tolist()] for c in (prompt, output, declared))
    requests = enumerate(zip(arrival_s.tolist(), p, o, d, strict=True))
    if user is None and prefix is None:
        return [Request(i, *row) for i, row in requests]
    users = [0] * len(prompt) if user is None else user.tolist()
    shared = [()] * len(prompt) if prefix is None else prefix
    return [Request(i, *row, prefix=shared[i], user=users[i]) for i, row in requests]


def draw_groups(count: int, shares: Sequence[float], rng: np.random.Generator) -> Ints:
    """The group of each of ``count`` requests: i with probability ``shares[i]``, else -1."""
    group = np.searchsorted(np.cumsum(shares), rng.random(count), side="right")
    return np.where(group < len(shares), group, -1)


def draw_sessions(count: int, low: int, high: int, rng: np.random.Generator) -> Ints:
    """The session of each of ``count`` requests, in order: 0, 0, 0, 1, 1, ... A session has ``low``
    to ``high`` turns, each number as likely; the last one may be cut short."""
    ends = np.cumsum(
        rng.integers(
            low,
            high,
            size=count,
            endpoint=True,
            dtype=np.int64,
        )
    )
    return np.searchsorted(ends, np.arange(count), side="right")


def with_turns_before(session: Ints, prompt: Ints, output: Ints) -> Ints:
    """Prompt tokens of every turn, which hold its session's earlier prompts and answers. ``prompt``
    and ``output`` are the tokens that a turn adds."""
    total = prompt + output
    before = np.cumsum(total) - total
    return np.asarray(prompt + before - before[np.searchsorted(session, session)], np.int64)


def shared_prefixes(
    system_tokens: Sequence[int], group: Ints | None, session: Ints | None, length: Ints
) -> list[Prefix]:
    """The shared prefix of each request. It is the system prompt of its ``group`` and, for the
    later turns of its ``session``, the KV tokens that it leaves: ``length`` (prompt and output)
    less the last token."""
    systems = [((("system prompt", i), tokens),) for i, tokens in enumerate(system_tokens)]
    heads = [()] * len(length) if group is None else [systems[i] if i >= 0 else () for i in group]
    if session is None:
        return list(heads)
    until = (length - 1).tolist()
    return [
        (*head, (("session", turn), until[i]))
        for i, (head, turn) in enumerate(zip(heads, session.tolist(), strict=True))
    ]


_STEEPEST = 256.0
"""Bound of the exponent that gaps are raised to."""


def longer(tokens: Ints, factor: float) -> Ints:
    """``tokens`` times ``factor``, rounded; at least one."""
    return np.asarray(np.maximum(1, np.rint(factor * tokens)), np.int64)


def longer_requests(
    prompt: Ints, output: Ints, factors: tuple[float, float], max_length: int
) -> tuple[Ints, Ints]:
    """Prompts and outputs times their factors. A request that fitted ``max_length`` still fits:
    first its output is cut, then its prompt."""
    fitted = prompt + output <= max_length
    longer_output = longer(output, factors[1])
    longer_output = np.where(fitted, np.minimum(longer_output, max_length - 1), longer_output)
    longer_prompt = longer(prompt, factors[0])
    most = np.where(fitted, max_length - longer_output, longer_prompt)
    return np.minimum(longer_prompt, most), longer_output


def longer_prefixes(prefixes: Iterable[Prefix], factor: float, ends: Ints) -> list[Prefix]:
    """The shared prefixes of longer prompts: ``factor`` times as long, at most ``ends`` each."""
    return [
        tuple((name, min(max(1, round(factor * until)), end)) for name, until in prefix)
        for prefix, end in zip(prefixes, ends.tolist(), strict=True)
    ]


def burstier(arrival_s: Floats, factor: float) -> Floats:
    """Arrivals in the same order and total time, with ``factor`` times the gaps' coefficient of
    variation. All gaps are raised to the same power, so long gaps grow and short ones shrink
    (exponential gaps become Weibull-distributed). Equal gaps stay as they are."""
    gaps = np.diff(arrival_s)
    if factor == 1 or len(gaps) < 2 or not gaps.std():
        return arrival_s
    wanted, scaled = factor * _variation(gaps), gaps / gaps.max()
    low, high = 0.0, 1.0
    while _variation(scaled**high) < wanted and high < _STEEPEST:
        low, high = high, 2 * high
    for _ in range(60):  # bisection: the variation grows with the power
        middle = (low + high) / 2
        low, high = (middle, high) if _variation(scaled**middle) < wanted else (low, middle)
    raised = scaled**high
    after = np.cumsum(raised * (gaps.sum() / raised.sum()))
    shifted: Floats = np.concatenate([arrival_s[:1], arrival_s[0] + after])
    return shifted


def _variation(gaps: Floats) -> float:
    return float(gaps.std() / gaps.mean())


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
    return f"closed loop of {clients:,} clients: each sends its next request after its answer"


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
    Whole blocks only, and never the last token of a prompt."""
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
