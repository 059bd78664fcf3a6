"""Requests to serve: their lengths and arrivals, from distributions or from a trace.

:func:`make_requests` joins lengths and arrivals. Every random choice has a stream of its own, keyed
by its use, so a new use does not change the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sarathi_sim.policies.request import Prefix, Request
from sarathi_sim.simulator.loop.records import Floats, Ints


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
    """(prompt, output) tokens with prompt : output about ``pd_ratio``, both at least 1. It is one
    for all, or one each.

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
    """Arrival times in seconds; gaps are gamma distributed with mean 1/rate and that coefficient
    of variation. The first gap counts, so the first arrival is not at 0.
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

    The rate is straight between ``rate`` at ``at_s`` (seconds, not falling; two alike are a jump),
    before the first as at the first, after the last as at the last, or with ``repeat`` from the
    first again. Arrivals of rate 1 are moved by the inverse of the rate's integral, which is exact.
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
    slope = np.append(np.divide(np.diff(rate), spans, out=np.zeros_like(spans), where=spans > 0), 0)
    left, low = events - ends[segment], rate[segment]
    # The root of low t + slope t^2 / 2 = left, in the form that has no difference of equals.
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
    rejects it. Without ``user`` all requests belong to user 0. ``prefix`` is what each request
    shares with others (None: nothing).
    """
    declared = output if declare_exact else np.maximum(output, max_length - prompt)
    # Lengths that are equal are one object: a million requests take 80 MB less.
    one: dict[int, int] = {}
    p, o, d = ([one.setdefault(n, n) for n in c.tolist()] for c in (prompt, output, declared))
    requests = enumerate(zip(arrival_s.tolist(), p, o, d, strict=True))
    if user is None and prefix is None:
        return [Request(i, *row) for i, row in requests]
    users = [0] * len(prompt) if user is None else user.tolist()
    shared = [()] * len(prompt) if prefix is None else prefix
    return [Request(i, *row, prefix=shared[i], user=users[i]) for i, row in requests]
