"""From a configuration to a real engine's work: one cell per scenario, one engine per layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.config.deployment import layers_of
from experiments.config.errors import ConfigError
from experiments.config.inputs import model_of
from experiments.config.loading import Experiment, Source
from experiments.config.requests import build_requests
from experiments.config.scenario import Scenario
from policies.policy import chunking_of, is_pooled, needs_costs, of_micro_batches
from policies.request import Request
from policies.scheduler import Scheduler
from profiler.engine.spec import EngineSpec
from profiler.facts.model import ModelSpec
from profiler.measuring.in_situ import GridWork, grid_works
from simulator.loop.quantum import quantize

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Cell:
    """A scenario that an engine serves and the simulator simulates."""

    name: str
    scenario: Scenario
    source: Source
    model: ModelSpec
    device: Literal["cpu", "cuda"]
    layers: tuple[int, ...]
    max_length: int

    @property
    def layout(self) -> tuple[int, int]:
        """(pp, tp): cells of the same share an engine."""
        return self.scenario.cluster.pp, self.scenario.cluster.tp

    @property
    def online(self) -> bool:
        """Whether requests arrive over time."""
        return self.scenario.workload.arrivals.kind != "at_once"

    @property
    def policy(self) -> dict[str, Any]:
        """The policy's name and arguments, as ``policies.catalogue.build`` takes them."""
        return self.scenario.policy.described()

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the scheduler."""
        batching = self.scenario.batching
        assert batching.max_batch is not None
        in_flight = batching.max_in_flight or self.scenario.cluster.pp
        return {
            "max_batch": batching.max_batch,
            "max_in_flight": in_flight,
            "kv_capacity": batching.max_batch * in_flight * self.max_length,
            "max_length": self.max_length,
            "reserve_declared": batching.kv_reservation == "declared",
            "free_pool": batching.micro_batches == "free",
        }

    def scheduler(self) -> Scheduler:
        """A fresh scheduler."""
        return Scheduler(of_micro_batches(self.scenario.policy.build()), **self.settings)

    def requests(self, seed: int | None = None, count: int | None = None) -> list[Request]:
        """The workload; with another seed or count one of the same kind, to calibrate on."""
        scenario = self.scenario
        update: dict[str, Any] = {} if seed is None else {"seed": seed}
        if count is not None:
            update["workload"] = scenario.workload.model_copy(update={"requests": count})
        made = build_requests(scenario.model_copy(update=update), self.max_length, self.source)
        # Arrivals in whole quanta, so that engine and simulator compare the very same numbers.
        return [
            Request(r.id, float(quantize(r.arrival_s)), r.prompt_tokens, r.output_tokens,
                    r.max_tokens)
            for r in made
        ]  # fmt: skip


def make_cells(experiment: Experiment) -> list[Cell]:
    """Every scenario, checked. Raises ConfigError for settings that the engine does not support."""
    return [
        _cell(name, scenario, experiment.sources[name])
        for name, scenario in experiment.scenarios.items()
    ]


def _cell(name: str, scenario: Scenario, source: Source) -> Cell:
    cluster, batching = scenario.cluster, scenario.batching
    model, policy = model_of(scenario, source), scenario.policy.build()
    policy_name = scenario.policy.name
    given = scenario.engine.model_dump(exclude_defaults=True)
    # Key, value, whether the engine can do that, and what it can do.
    for key, value, good, problem in (
        ("device", scenario.device, scenario.device in ("cpu", "cuda"),
         "must be cpu or cuda: the machine that runs this command is validated"),
        ("cluster.replicas", cluster.replicas, cluster.replicas == 1,
         "must be 1: one engine is run"),
        ("batching.formation", batching.formation, batching.formation == "lazy",
         "must be lazy: the engine forms a batch when its first stage is free"),
        ("policy.name", policy_name, not needs_costs(policy),
         "needs predicted times, which only the simulator has"),
        ("policy.name", policy_name, not is_pooled(policy),
         "acts on a pool with paged memory, which this engine does not have"),
        ("workload.too_long", scenario.workload.too_long, scenario.workload.too_long == "error",
         "must be error: the engine's KV slots hold cluster.max_length tokens"),
        ("engine", given, not given, "must be left out: a real engine is measured instead"),
    ):  # fmt: skip
        if not good:
            raise source.error(key, value, problem)
    if batching.max_batch is None:
        raise ConfigError(f"{source.name(('batching', 'max_batch'))}: this key is missing")
    layers = layers_of(scenario, model, source)
    device: Literal["cpu", "cuda"] = "cpu" if scenario.device == "cpu" else "cuda"
    max_length = cluster.max_length or model.max_position_embeddings
    cell = Cell(name, scenario, source, model, device, layers, max_length)
    try:
        cell.scheduler()
    except ValueError as error:
        raise source.error("batching.micro_batches", batching.micro_batches, str(error)) from None
    return cell


def engine_spec(
    cells: Sequence[Cell], dtype: Dtype = "float32", *, realtime: bool = False
) -> EngineSpec:
    """The engine that can serve all of the cells, which have one layout."""
    first = cells[0]
    for cell in cells:
        problem = f"must be as in {first.name}, whose engine it shares"
        if (cell.model, cell.layers) != (first.model, first.layers):
            raise cell.source.error("model", cell.scenario.model, problem)
        if cell.device != first.device:
            raise cell.source.error("device", cell.device, problem)
    batch = max(cell.settings["max_batch"] for cell in cells)
    slots = max(cell.settings["max_batch"] * cell.settings["max_in_flight"] for cell in cells)
    longest = max(cell.max_length for cell in cells)
    return EngineSpec(
        first.model,
        first.layers,
        first.scenario.cluster.tp,
        slots=slots + 1,  # the grid's chunk has one of its own
        max_length=longest,
        max_tokens=batch * longest,
        device=first.device,
        dtype=dtype,
        realtime=realtime,
    )


def grid_of(cells: Sequence[Cell]) -> list[GridWork]:
    """Micro-batches that cover those of the cells."""
    batch = max(cell.settings["max_batch"] for cell in cells)
    requests = [request for cell in cells for request in cell.requests()]
    prompt = max(request.prompt_tokens for request in requests)
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    chunks: set[int] = set()
    for cell in cells:
        chunking = chunking_of(cell.scenario.policy.build())
        if chunking is not None:
            size = chunking.tokens
            chunks |= {max(1, size // 4), max(1, size // 2), max(1, size - batch), size}
    whole = [16, 32, *range(64, prompt, 64), prompt]
    return grid_works(batch, sorted(c for c in chunks if c <= prompt), whole, longest)
