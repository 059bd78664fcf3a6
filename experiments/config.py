"""What an experiment may say: every key, its type, its bounds and its default.

The ``workload`` section is in :mod:`experiments.config_workload`.
:mod:`experiments.loading` reads these from YAML and turns mistakes into messages.
"""

from __future__ import annotations

from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union, get_type_hints

from pydantic import Field, StringConstraints, create_model, model_validator

from experiments.config_base import Count, Degree, Name, Positive, Seconds, Strict, Text, Tokens
from experiments.config_workload import Workload
from policies.catalogue import build, builders
from policies.policy import Builder, Policy


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


class NamedPolicy(Strict):
    """A policy's name, and its arguments."""

    name: str

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        self.build()
        return self

    def build(self) -> Policy:
        """The policy object this describes."""
        return build(**self.model_dump())


def _policy_model(name: str, builder: Builder) -> type[NamedPolicy]:
    """The keys that a policy takes: the parameters of what builds it. Whole numbers are counts."""
    made_by = builder.__init__ if isinstance(builder, type) else builder  # type: ignore[misc]
    hints = get_type_hints(made_by)
    fields: dict[str, Any] = {"name": (Literal[name], ...)}
    for key, parameter in signature(builder).parameters.items():
        needed = parameter.default is Parameter.empty
        kind = Tokens if hints[key] is int else hints[key]
        fields[key] = (kind, ... if needed else parameter.default)
    about = (builder.__doc__ or "").partition("\n")[0]
    return create_model(
        f"{name}_policy", __base__=NamedPolicy, __doc__=about, __module__=__name__, **fields
    )


POLICIES = {name: _policy_model(name, builder) for name, builder in builders().items()}
"""Every policy of ``policies/`` that has a name."""

# By name in this module, so that a worker of a sweep unpickles these very classes and not copies.
globals().update({model.__name__: model for model in POLICIES.values()})

if TYPE_CHECKING:
    PolicyConfig = NamedPolicy
else:
    PolicyConfig = Annotated[Union[tuple(POLICIES.values())], Field(discriminator="name")]  # noqa: UP007


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
    policy: PolicyConfig
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


class Validation(Strict):
    """What ``sarathi-sim validate`` does with the scenarios: how often it runs each, how long the
    calibration runs around each are, and the ``dtype`` that the engine computes in."""

    repeats: Annotated[int, Field(ge=1, le=100)] = 5
    calibration_requests: Annotated[int, Field(ge=1, le=10_000)] = 10
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class Header(Strict):
    """The keys of a file beside those of its scenarios."""

    name: Name
    description: Annotated[str, StringConstraints(max_length=20_000)] = ""
    compare: dict[Name, Ratio] = Field(default_factory=dict)
    validation: Validation = Validation()
