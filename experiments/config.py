"""What an experiment may say: every key, its type, its bounds and its default.

:mod:`experiments.loading` reads these from YAML and turns mistakes into messages.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from policies.orca import Orca, OrcaWorstCase
from policies.policy import Policy
from policies.request_level import RequestLevel
from policies.sarathi import ChunkRule, Sarathi

# Names become folder and file names.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Tokens = Annotated[int, Field(ge=1, le=16_777_216)]
Degree = Annotated[int, Field(ge=1, le=4096)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Seconds = Annotated[float, Field(ge=0, le=3600)]


class Strict(BaseModel):
    """Unknown keys, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


# Workload ------------------------------------------------------------------------------------


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


class TraceLengths(Strict):
    """Prompt and output tokens (and arrivals, where it has them) from a CSV file."""

    kind: Literal["trace"]
    path: Text


Lengths = ZipfLengths | UniformLengths | FixedLengths | TraceLengths


class AtOnce(Strict):
    """All requests arrive at t = 0."""

    kind: Literal["at_once"]


class Poisson(Strict):
    """Independent arrivals, ``rate`` requests a second."""

    kind: Literal["poisson"]
    rate: Positive


class Gamma(Strict):
    """Gamma-distributed gaps between arrivals; ``cv`` is their coefficient of variation."""

    kind: Literal["gamma"]
    rate: Positive
    cv: Positive


class TraceArrivals(Strict):
    """Arrivals as in the trace that ``lengths`` names."""

    kind: Literal["trace"]


Arrivals = AtOnce | Poisson | Gamma | TraceArrivals


class Workload(Strict):
    """The requests. ``pd_ratio`` splits a total length into prompt and output tokens.

    ``requests`` may be left out for a trace (all of it). ``declared`` is what a request says it
    may generate: up to ``max_length``, or ``exact``-ly its true output length.
    """

    lengths: Annotated[Lengths, Field(discriminator="kind")]
    arrivals: Annotated[Arrivals, Field(discriminator="kind")] = AtOnce(kind="at_once")
    requests: Count | None = None
    pd_ratio: Positive | None = None
    too_long: Literal["error", "reject"] = "error"
    declared: Literal["to_max_length", "exact"] = "to_max_length"


# Cluster, policy, batching, engine -----------------------------------------------------------


class Cluster(Strict):
    """``replicas`` pipelines of ``pp`` stages, each on ``tp`` GPUs, behind a router.

    ``max_length`` is the longest prompt + output a sequence may have (default: the model's).
    ``layers_per_stage`` defaults to an even split.
    """

    tp: Degree = 1
    pp: Degree = 1
    replicas: Degree = 1
    router: Literal["round_robin", "least_tokens"] = "round_robin"
    layers_per_stage: list[Degree] | None = None
    usable_memory: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_length: Tokens | None = None


class RequestLevelPolicy(Strict):
    """Request-level batching, as in FasterTransformer."""

    name: Literal["request_level"]

    def build(self) -> Policy:
        """The policy object this describes."""
        return RequestLevel()


class OrcaPolicy(Strict):
    """Iteration-level scheduling with whole prompts, in the paper's three cases."""

    name: Literal["orca"]
    case: Literal["best", "worst", "unconstrained"] = "best"

    def build(self) -> Policy:
        """The policy object this describes."""
        if self.case == "worst":
            return OrcaWorstCase()
        return Orca(max_prefills=1 if self.case == "best" else None)


class SarathiPolicy(Strict):
    """Chunked prefills and decode-maximal batching."""

    name: Literal["sarathi"]
    chunk_size: Tokens = 256
    tile: Tokens = 128
    chunk_rule: ChunkRule = "fill"

    def build(self) -> Policy:
        """The policy object this describes."""
        return Sarathi(self.chunk_size, self.tile, self.chunk_rule)


PolicyConfig = RequestLevelPolicy | OrcaPolicy | SarathiPolicy


class Batching(Strict):
    """How micro-batches are formed.

    ``max_batch`` defaults to what the memory holds, ``max_in_flight`` to ``pp``. ``formation``:
    form a batch when a micro-batch returns (eager) or when stage 0 is free (lazy).
    ``micro_batches``: a request stays in one (bound) or may ride in any (free).
    """

    max_batch: Count | None = None
    max_in_flight: Degree | None = None
    formation: Literal["eager", "lazy"] = "eager"
    micro_batches: Literal["bound", "free"] = "bound"
    kv_reservation: Literal["max_length", "declared"] = "max_length"


class Engine(Strict):
    """What the serving engine adds: scheduler turn-around a batch, run-time jitter (coefficient
    of variation), sends that occupy the stage or not, and whether logits are computed.

    ``layer_time``: as whole layers were ``measured`` (where the profile holds some), or the ``sum``
    of the ops."""

    turnaround_s: Seconds = 0.0
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0
    send: Literal["overlapped", "blocking"] = "overlapped"
    lm_head: bool = True
    layer_time: Literal["measured", "sum"] = "measured"


class Scenario(Strict):
    """One simulation, complete.

    ``model`` is a shipped model or the path of a Hugging Face ``config.json``; ``device`` a shipped
    device or a device YAML; ``profiles`` the folder of profile bundles (default: the shipped one).
    Paths are relative to the folder in which the command runs.
    """

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    model: Text
    device: Text
    profiles: Text | None = None
    workload: Workload
    cluster: Cluster = Cluster()
    policy: Annotated[PolicyConfig, Field(discriminator="name")]
    batching: Batching = Batching()
    engine: Engine = Engine()


# The file ------------------------------------------------------------------------------------


class Ratio(Strict):
    """A metric of one scenario divided by that of another, beside the value a paper states.

    ``metric`` is a dotted path into the summary, such as ``makespan_s`` or ``bubble_s.p50``.
    """

    metric: Text
    over: Annotated[list[Name], Field(min_length=2, max_length=2)]
    paper: Positive | None = None
    label: Text | None = None


class Header(Strict):
    """The keys of a file beside those of its scenarios."""

    name: Name
    description: Annotated[str, StringConstraints(max_length=20_000)] = ""
    compare: dict[Name, Ratio] = {}
