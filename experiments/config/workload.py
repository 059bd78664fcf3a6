"""The ``workload`` section: the lengths of requests, and their arrivals."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal

from pydantic import (
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
)

from .base import (
    Count,
    Name,
    Positive,
    Share,
    Strict,
    Text,
    Tokens,
    key,
)


class ZipfLengths(Strict):
    """Prompt + output tokens: the k-th of ``min, min + step, ...`` has p ~ k ** -theta."""

    kind: Literal["zipf"]
    theta: float = key("Zipf exponent", ge=0, le=100)
    min: Tokens = key("shortest request", "tokens")
    max: Tokens = key("longest request", "tokens")
    step: Tokens = key("step of the lengths", "tokens", default=1)


class UniformLengths(Strict):
    """Prompt + output tokens: every whole number from ``min`` to ``max`` is as likely."""

    kind: Literal["uniform"]
    min: Tokens = key("shortest request", "tokens")
    max: Tokens = key("longest request", "tokens")


class FixedLengths(Strict):
    """All requests alike: ``prompt`` and ``decode``, or ``total`` split by ``pd_ratio``."""

    kind: Literal["fixed"]
    total: Tokens | None = key("length of a request", "tokens", "length", default=None)
    prompt: Tokens | None = key("prompt", "tokens", default=None)
    decode: Tokens | None = key("output", "tokens", default=None)


class RandomLengths(Strict):
    """Prompt and output tokens apart, as a load generator draws them: each a whole number between
    two bounds, as likely as any other. ``tool`` says between which.

    ``vllm``, as ``vllm bench serve`` draws today: within ``range_ratio`` (0 to below 1) of
    ``prompt`` (``decode``), which is the mean. ``sglang``, as the benchmarks of SGLang, InferenceX
    and older vLLM draw: from ``range_ratio`` (above 0 to 1) times ``prompt`` (``decode``) up to it.
    Without ``range_ratio`` all requests are alike.
    """

    kind: Literal["random"]
    prompt: Tokens = key("prompt", "tokens")
    decode: Tokens = key("output", "tokens")
    tool: Literal["vllm", "sglang"] = key(
        "load generator that lengths are drawn like", default="vllm"
    )
    range_ratio: Annotated[float, Field(ge=0, le=1)] | None = key(
        "spread of lengths", short="range", default=None
    )

    @field_validator("range_ratio")
    @classmethod
    def _of_its_tool(cls, value: float | None, found: ValidationInfo) -> float | None:
        tool = found.data.get("tool")
        if tool == "vllm" and value == 1:
            raise ValueError("must be less than 1: tool vllm draws around the length")
        if tool == "sglang" and value == 0:
            raise ValueError("must be more than 0: tool sglang draws from it times the length up")
        return value

    def bounds(self, tokens: int) -> tuple[int, int]:
        """The fewest and the most tokens of a prompt (an output) that is stated as ``tokens``.
        Around it as vLLM rounds them, down and up, but never below 1: so it is the mean."""
        if self.range_ratio is None:
            return tokens, tokens
        if self.tool == "sglang":
            return max(1, int(self.range_ratio * tokens)), tokens
        # 0.07 x 100 is a little more than 7 in binary.
        around = min(ceil(round(self.range_ratio * tokens, 6)), tokens - 1)
        return tokens - around, tokens + around


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
    prompt: Percentiles = key("prompt", "tokens")
    decode: Percentiles = key("output", "tokens")

    def tokens(self, key: str) -> dict[float, float]:
        """The tokens of ``prompt`` or ``decode`` by percent, in order."""
        given: dict[str, float] = getattr(self, key)
        return dict(sorted((float(name.removeprefix("p")), n) for name, n in given.items()))


class TraceColumns(Strict):
    """Columns of a trace that go by names of their own."""

    arrival: Text | None = key("column of arrivals", default=None)
    prompt: Text | None = key("column of prompt tokens", default=None)
    output: Text | None = key("column of output tokens", default=None)
    user: Text | None = key("column of users", default=None)
    session: Text | None = key("column of sessions", default=None)
    turn: Text | None = key("column of turns", default=None)


class Clip(Strict):
    """The most tokens of a prompt, and of an output; longer ones are cut to it."""

    prompt: Tokens | None = key("longest prompt", "tokens", default=None)
    output: Tokens | None = key("longest output", "tokens", default=None)


class TraceLengths(Strict):
    """Prompt and output tokens (and arrivals and shared prefixes, where it has them) from a file:
    CSV, a request a line of JSON (``*.jsonl``), or a result of vLLM's benchmark (``*.json``);
    also packed (``*.gz``).

    ``sample`` keeps a random share of the requests (or sessions), ``clip`` cuts long ones, and
    ``skip_empty`` leaves out those without prompt or output tokens. ``resample`` draws as many
    requests as are asked for: blocks of so many consecutive ones, with the gaps between them, in a
    random order that follows from the seed, round after round.
    """

    kind: Literal["trace"]
    path: Text = key("trace")
    columns: TraceColumns = key("columns of the trace", default=TraceColumns())
    time_unit: Literal["s", "ms", "us", "ns"] | None = key(
        "unit of the trace's times", default=None
    )
    skip_empty: bool = key("without empty requests", default=False)
    block_tokens: Tokens | None = key("block of a trace's prompts", "tokens", default=None)
    sample: Share = key("share of the trace", short="sample", default=1.0)
    clip: Clip = Clip()
    resample: Count | None = key("blocks of the trace", "requests", "blocks", default=None)


Lengths = (
    ZipfLengths | UniformLengths | FixedLengths | RandomLengths | QuantileLengths | TraceLengths
)


class AtOnce(Strict):
    """All requests arrive at t = 0."""

    kind: Literal["at_once"]


class Poisson(Strict):
    """Independent arrivals, ``rate`` requests a second."""

    kind: Literal["poisson"]
    rate: Positive = key("arrival rate", "requests/s", "rate")


class Gamma(Strict):
    """Gamma-distributed gaps between arrivals; ``cv`` is their coefficient of variation. Below
    0.001 the gaps are practically regular; above 10 nearly all gaps would be 0."""

    kind: Literal["gamma"]
    rate: Positive = key("arrival rate", "requests/s", "rate")
    cv: float = key("variation of the gaps between arrivals", short="variation", ge=0.001, le=10)


class TraceArrivals(Strict):
    """Arrivals as in the trace that ``lengths`` names, at ``scale`` times its rate."""

    kind: Literal["trace"]
    scale: Positive = key("scale of the arrival rate", short="scale", default=1.0)


class RateAt(Strict):
    """``rate`` requests a second at ``at_s``."""

    at_s: float = key("time of an arrival rate", short="time", ge=0, le=1e7)
    rate: float = key("arrival rate then", "requests/s", "rate", ge=0, le=1e9)


class Varying(Strict):
    """Independent arrivals at a rate that varies: straight between ``rates``, and after the last as
    at the last, or with ``repeat`` from the first again. Two at the same time are a jump. ``scale``
    multiplies all rates."""

    kind: Literal["varying"]
    rates: list[RateAt] = key("arrival rates", min_length=1, max_length=10_000)
    repeat: bool = key("rates again", default=False)
    scale: Positive = key("scale of the arrival rate", short="scale", default=1.0)


class Closed(Strict):
    """``clients`` requests are under way: the first ones are sent at 0, and the next one whenever
    one finishes, ``think_s`` seconds later in the mean (exponentially distributed)."""

    kind: Literal["closed_loop"]
    clients: Count = key("clients")
    think_s: float = key("think time", default=0.0, ge=0, le=1e6)


Arrivals = AtOnce | Poisson | Gamma | Varying | TraceArrivals | Closed


class SystemPrompt(Strict):
    """``tokens`` that stand before the prompts of a ``share`` of all requests (or sessions)."""

    share: float = key("share with a system prompt", short="share", ge=0, le=1)
    tokens: Tokens = key("system prompt", "tokens")


class Sessions(Strict):
    """Conversations of ``min_turns`` to ``max_turns`` requests, each number as likely. A turn's
    prompt holds the prompts and answers of the turns before it. It is sent ``think_s`` seconds in
    the mean after the last answer was finished (exponentially distributed)."""

    min_turns: Count = key("fewest turns of a session", short="turns from", default=1)
    max_turns: Count = key("most turns of a session", short="turns to")
    think_s: float = key("think time between turns", short="think time", ge=0, le=1e6)


class PdRange(Strict):
    """P:D from ``low`` to ``high``, drawn for each request, evenly over its logarithm."""

    low: Positive = key("least P:D", short="P:D from")
    high: Positive = key("most P:D", short="P:D to")


def _pd_form(value: object) -> str:
    return "<range>" if isinstance(value, dict | PdRange) else "<number>"


PdRatio = Annotated[
    Annotated[Positive, Tag("<number>")] | Annotated[PdRange, Tag("<range>")],
    Discriminator(_pd_form),
]

Times = Annotated[float, Field(gt=0, le=100)]


class Shift(Strict):
    """What if: prompts and outputs so many times as long (a request that fitted
    ``cluster.max_length`` is cut to it), and gaps between arrivals whose coefficient of variation
    is ``burstiness`` times what it was, at the same mean rate."""

    prompt: Times = key("prompts so many times as long", short="prompts x", default=1.0)
    output: Times = key("outputs so many times as long", short="outputs x", default=1.0)
    burstiness: Times = key("burstiness so many times", short="burstiness x", default=1.0)


class Workload(Strict):
    """The requests. ``pd_ratio`` (a number, or ``low`` and ``high``) splits a total length into
    prompt and output tokens.

    ``requests`` may be left out for a trace (all of it). ``declared`` is what a request says it
    may generate: up to ``max_length``, or ``exact``-ly its true output length. With ``sessions``
    the lengths are what a turn adds, and ``arrivals`` are those of sessions. ``system_prompts``
    are longer prompts, too: they stand before what ``lengths`` says. ``shift`` asks what if.
    ``every`` keeps only every n-th request of the traffic, as many as ``requests``: what a router
    that takes turns hands to one of n replicas.
    """

    lengths: Lengths = key("lengths", discriminator="kind")
    arrivals: Arrivals = key("arrivals", default=AtOnce(kind="at_once"), discriminator="kind")
    requests: Count | None = key("requests", default=None)
    pd_ratio: PdRatio | None = key(
        "prompt tokens for each output token (P:D)", short="P:D", default=None
    )
    too_long: Literal["error", "reject"] = key("requests that are too long", default="error")
    declared: Literal["to_max_length", "exact"] = key("declared output", default="to_max_length")
    system_prompts: dict[Name, SystemPrompt] = key("system prompts", default={})
    sessions: Sessions | None = key("sessions", default=None)
    shift: Shift = key("shift of the workload", default=Shift())
    every: Count = key("every n-th request", short="every", default=1)
