"""The ``workload`` section: the lengths of requests, and their arrivals."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from experiments.config.base import Count, Name, Positive, Strict, Text, Tokens


class ZipfLengths(Strict):
    """Prompt + output tokens: the k-th of ``min, min + step, ...`` has p ~ k ** -theta."""

    kind: Literal["zipf"]
    theta: Annotated[float, Field(ge=0, le=100)]
    min: Tokens
    max: Tokens
    step: Tokens = 1


class UniformLengths(Strict):
    """Prompt + output tokens: every whole number from ``min`` to ``max`` is as likely."""

    kind: Literal["uniform"]
    min: Tokens
    max: Tokens


class FixedLengths(Strict):
    """All requests alike: ``prompt`` and ``decode``, or ``total`` split by ``pd_ratio``."""

    kind: Literal["fixed"]
    total: Tokens | None = None
    prompt: Tokens | None = None
    decode: Tokens | None = None


class RandomLengths(Strict):
    """Prompt and output tokens apart, as load generators draw them: each a whole number between
    ``range_ratio`` of ``prompt`` (``decode``) and all of it, as likely as any other."""

    kind: Literal["random"]
    prompt: Tokens
    decode: Tokens
    range_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0


Percentile = Annotated[str, StringConstraints(pattern=r"^p(100|\d{1,2}(\.\d+)?)$")]
Percentiles = Annotated[
    dict[Percentile, Annotated[float, Field(ge=1, le=16_777_216)]],
    Field(min_length=2, max_length=1000),
]
"""Tokens by percentile: 99 percent of the requests have no more than ``p99`` of them."""


class QuantileLengths(Strict):
    """Prompt and output tokens, drawn apart from each other by their percentiles from ``p0`` to
    ``p100``, linear in between."""

    kind: Literal["quantiles"]
    prompt: Percentiles
    decode: Percentiles

    def tokens(self, key: str) -> dict[float, float]:
        """Those of ``prompt`` or ``decode`` by percent, in order."""
        given: dict[str, float] = getattr(self, key)
        return dict(sorted((float(name.removeprefix("p")), n) for name, n in given.items()))


class TraceColumns(Strict):
    """Columns of a trace that go by names of their own."""

    arrival: Text | None = None
    prompt: Text | None = None
    output: Text | None = None
    user: Text | None = None
    session: Text | None = None
    turn: Text | None = None


class Clip(Strict):
    """The most tokens of a prompt, and of an output; longer ones are cut to it."""

    prompt: Tokens | None = None
    output: Tokens | None = None


class TraceLengths(Strict):
    """Prompt and output tokens (and arrivals and shared prefixes, where it has them) from a file:
    CSV, a request a line of JSON (``*.jsonl``), or a result of vLLM's benchmark (``*.json``).

    ``sample`` keeps a random share of the requests (or sessions), ``clip`` cuts long ones, and
    ``skip_empty`` leaves out those without prompt or output tokens.
    """

    kind: Literal["trace"]
    path: Text
    columns: TraceColumns = TraceColumns()
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    skip_empty: bool = False
    sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    clip: Clip = Clip()


Lengths = (
    ZipfLengths | UniformLengths | FixedLengths | RandomLengths | QuantileLengths | TraceLengths
)


class AtOnce(Strict):
    """All requests arrive at t = 0."""

    kind: Literal["at_once"]


class Poisson(Strict):
    """Independent arrivals, ``rate`` requests a second."""

    kind: Literal["poisson"]
    rate: Positive


class Gamma(Strict):
    """Gamma-distributed gaps between arrivals; ``cv`` is their coefficient of variation.

    Below 0.001 the gaps are practically regular; above 10 nearly all gaps would be 0.
    """

    kind: Literal["gamma"]
    rate: Positive
    cv: Annotated[float, Field(ge=0.001, le=10)]


class TraceArrivals(Strict):
    """Arrivals as in the trace that ``lengths`` names, at ``scale`` times its rate."""

    kind: Literal["trace"]
    scale: Positive = 1.0


class RateAt(Strict):
    """``rate`` requests a second at ``at_s``."""

    at_s: Annotated[float, Field(ge=0, le=1e7)]
    rate: Annotated[float, Field(ge=0, le=1e9)]


class Varying(Strict):
    """Independent arrivals at a rate that varies: straight between ``rates``, and after the last as
    at the last, or with ``repeat`` from the first again.

    Two at the same time are a jump. ``scale`` multiplies all rates.
    """

    kind: Literal["varying"]
    rates: Annotated[list[RateAt], Field(min_length=1, max_length=10_000)]
    repeat: bool = False
    scale: Positive = 1.0


class Closed(Strict):
    """``clients`` requests are under way: the first ones are sent at 0, and the next one whenever
    one finishes, ``think_s`` seconds later in the mean (exponentially distributed)."""

    kind: Literal["closed_loop"]
    clients: Count
    think_s: Annotated[float, Field(ge=0, le=1e6)] = 0.0


Arrivals = AtOnce | Poisson | Gamma | Varying | TraceArrivals | Closed


class SystemPrompt(Strict):
    """``tokens`` that stand before the prompts of a ``share`` of all requests (or sessions)."""

    share: Annotated[float, Field(ge=0, le=1)]
    tokens: Tokens


class Sessions(Strict):
    """Conversations of ``min_turns`` to ``max_turns`` requests, each number as likely.

    A turn's prompt holds the prompts and answers of the turns before it. It is sent ``think_s``
    seconds in the mean after the last answer was finished (exponentially distributed).
    """

    min_turns: Count = 1
    max_turns: Count
    think_s: Annotated[float, Field(ge=0, le=1e6)]


Times = Annotated[float, Field(gt=0, le=100)]


class Shift(Strict):
    """What if: prompts and outputs so many times as long (a request that fitted
    ``cluster.max_length`` is cut to it), and gaps between arrivals whose coefficient of variation
    is ``burstiness`` times what it was, at the same mean rate."""

    prompt: Times = 1.0
    output: Times = 1.0
    burstiness: Times = 1.0


class Workload(Strict):
    """The requests. ``pd_ratio`` splits a total length into prompt and output tokens.

    ``requests`` may be left out for a trace (all of it). ``declared`` is what a request says it
    may generate: up to ``max_length``, or ``exact``-ly its true output length. With ``sessions``
    the lengths are what a turn adds, and ``arrivals`` are those of sessions. ``system_prompts``
    are longer prompts, too: they stand before what ``lengths`` says. ``shift`` asks what if.
    """

    lengths: Annotated[Lengths, Field(discriminator="kind")]
    arrivals: Annotated[Arrivals, Field(discriminator="kind")] = AtOnce(kind="at_once")
    requests: Count | None = None
    pd_ratio: Positive | None = None
    too_long: Literal["error", "reject"] = "error"
    declared: Literal["to_max_length", "exact"] = "to_max_length"
    system_prompts: dict[Name, SystemPrompt] = Field(default_factory=dict)
    sessions: Sessions | None = None
    shift: Shift = Shift()
