"""What the engine in torch serves: scenarios as cells, an engine for those of one layout, and the
grid of synthetic work that covers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

from pydantic import BaseModel

from sarathi_sim.policies.catalogue import is_pooled, of_micro_batches
from sarathi_sim.policies.micro_batches import MicroBatches
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import Scheduler
from sarathi_sim.profiler.engine.spec import EngineSpec, GridWork
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.planning.grid import skewed_contexts
from sarathi_sim.simulator.loop.clock import quantize
from ...config.base import Source
from ...config.deployment import layers_of
from ...config.inputs import model_of
from ...config.loading import Experiment
from ...config.requests import build_requests
from ...config.scenario import Engine, Scenario
from ...report.section import Table


@dataclass(frozen=True)
class Cell:
    """A scenario that the engine serves and the simulator simulates."""

    name: str
    scenario: Scenario
    source: Source
    model: ModelSpec
    device: Literal["cpu", "cuda"]
    layers: tuple[int, ...]
    max_batch: int
    max_length: int

    @property
    def layout(self) -> tuple[int, int]:
        """(pp, tp): cells of the same share an engine."""
        return self.scenario.cluster.pp, self.scenario.cluster.tp

    @property
    def online(self) -> bool:
        """Whether requests arrive over time, so that the clock decides the batches."""
        return self.scenario.workload.arrivals.kind != "at_once"

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the scheduler."""
        batching = self.scenario.batching
        in_flight = batching.max_in_flight or self.scenario.cluster.pp
        return {
            "max_batch": self.max_batch,
            "max_in_flight": in_flight,
            "kv_capacity": self.max_batch * in_flight * self.max_length,
            "max_length": self.max_length,
            "reserve_declared": batching.kv_reservation == "declared",
            "free_pool": batching.micro_batches == "free",
        }

    def scheduler(self) -> Scheduler:
        """A fresh scheduler for the simulator."""
        return MicroBatches(of_micro_batches(self.scenario.policy.build()), **self.settings)

    def requests(self, seed: int | None = None, count: int | None = None) -> list[Request]:
        """The workload; with another seed or count a similar workload for calibration."""
        scenario = self.scenario
        update: dict[str, Any] = {} if seed is None else {"seed": seed}
        if count is not None:
            update["workload"] = scenario.workload.model_copy(update={"requests": count})
        made = build_requests(scenario.model_copy(update=update), self.max_length, self.source)
        # Arrivals in whole quanta, so that engine and simulator compare the very same numbers.
        return [
            replace(
                r,
                arrival_s=float(quantize(r.arrival_s)),
                prefix=(),
            )
            for r in made
        ]


_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "device": (("cpu", "cuda"), "must be cpu or cuda: the machine that runs this is validated"),
    "cluster.replicas": ((1,), "must be 1: one engine is run"),
    "batching.formation": (
        ("lazy",), "must be lazy: the engine forms a batch when its first stage is free"
    ),
    "kv_cache": ((None,), "must be left out: the engine's memory is not paged"),
    "workload.too_long": (
        ("error",), "must be error: the engine's KV slots hold cluster.max_length tokens"
    ),
    "workload.arrivals.kind": (
        ("at_once", "poisson", "gamma", "trace", "varying"),
        "needs clients that wait for answers, which only the simulator has",
    ),
    "workload.sessions": ((None,), "must be left out: only the simulator waits for answers"),
    "speculation": ((None,), "must be left out: the engine that is run has no drafter"),
    "engine": ((Engine(),), "must be left out: a real engine is measured instead"),
}  # fmt: skip
"""Keys, their values that the engine supports, and what it supports in words."""
_PAGED = (
    "must be request_level, orca, sarathi or your own that reserves memory for whole requests: "
    "the engine's memory is not paged"
)
_COSTS = "needs predicted times, which only the simulator has"


def make_cells(experiment: Experiment) -> list[Cell]:
    """Every scenario, checked. Raises UserError for settings that the engine does not support."""
    return [
        _cell(name, one, experiment.sources[name]) for name, one in experiment.scenarios.items()
    ]


def _cell(name: str, scenario: Scenario, source: Source) -> Cell:
    cluster, batching = scenario.cluster, scenario.batching
    model, policy = model_of(scenario, source), scenario.policy.build()
    try:
        model.check_plain("the engine")
    except ValueError as error:
        raise source.error("model", scenario.model, str(error)) from None
    for wrong, problem in ((is_pooled(policy), _PAGED), (policy.needs_costs, _COSTS)):
        if wrong:
            raise source.error("policy.name", scenario.policy.name, problem)
    for key, (supported, problem) in _SUPPORTED.items():
        value: Any = reduce(getattr, key.split("."), scenario)
        if value not in supported:
            if isinstance(value, BaseModel):
                value = value.model_dump(exclude_defaults=True)
            raise source.error(key, value, problem)
    if batching.max_batch is None:
        raise source.error("batching.max_batch", None, "this key is missing")
    layers = layers_of(scenario, model, source)
    device: Literal["cpu", "cuda"] = "cpu" if scenario.device == "cpu" else "cuda"
    max_length = cluster.max_length or model.max_position_embeddings
    cell = Cell(name, scenario, source, model, device, layers, batching.max_batch, max_length)
    try:
        cell.scheduler()
    except ValueError as error:
        raise source.error("batching.micro_batches", batching.micro_batches, str(error)) from None
    return cell


def cells_table(cells: Sequence[Cell]) -> Table:
    """The cells of a validation, side by side."""
    rows: dict[str, list[str]] = {
        "model": [cell.model.name for cell in cells],
        "this machine's": [cell.device for cell in cells],
        "policy": [cell.scenario.policy.name for cell in cells],
        "TP x PP": [f"{tp} x {pp}" for pp, tp in (cell.layout for cell in cells)],
        "sequences of a micro-batch": [str(cell.max_batch) for cell in cells],
        "requests": [f"{len(cell.requests()):,}" for cell in cells],
    }
    return Table(
        "",
        ("", *(cell.name for cell in cells)),
        [[k, *v] for k, v in rows.items()],
    )


def engine_spec(
    cells: Sequence[Cell],
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    *,
    realtime: bool = False,
) -> EngineSpec:
    """The engine that can serve all of the cells, which have one layout."""
    first = cells[0]
    for cell in cells:
        problem = f"must be as in {first.name}, whose engine it shares"
        if (cell.model, cell.layers) != (first.model, first.layers):
            raise cell.source.error("model", cell.scenario.model, problem)
        if cell.device != first.device:
            raise cell.source.error("device", cell.device, problem)
    longest = max(cell.max_length for cell in cells)
    return EngineSpec(
        first.model,
        first.layers,
        first.scenario.cluster.tp,
        # The grid's chunk has a slot of its own.
        slots=1 + max(cell.max_batch * cell.settings["max_in_flight"] for cell in cells),
        max_length=longest,
        max_tokens=max(cell.max_batch for cell in cells) * longest,
        device=first.device,
        dtype=dtype,
        realtime=realtime,
    )


def grid_of(cells: Sequence[Cell]) -> list[GridWork]:
    """Micro-batches that cover the range of the cells' micro-batches.

    Decodes alone: every number, at three contexts, and some with unequal ones. Chunks alone: parts
    of the policies' chunks with and without context, other prompts without. Both: the largest of
    each with few and many decodes. Slot 0 is the chunk's.
    """
    most = max(cell.max_batch for cell in cells)
    requests = [request for cell in cells for request in cell.requests()]
    prompt = max(request.prompt_tokens for request in requests)
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    chunkings = [cell.scenario.policy.build().chunking for cell in cells]
    sizes = {chunking.tokens for chunking in chunkings if chunking is not None}
    parts = {n for size in sizes for n in (size // 4, size // 2, size - most, size)}
    chunks = {max(1, tokens) for tokens in parts if tokens <= prompt}
    whole = {16, 32, *range(64, prompt, 64), prompt}
    mean = longest // 2
    contexts = [
        [context] * batch
        for batch in range(1, most + 1)
        for context in (longest // 8, mean, longest - 1)
    ]
    contexts += [
        skewed_contexts(batch, mean, largest)
        for batch in (most // 2, most)
        for largest in (5 * mean // 4, 7 * mean // 4)
        if largest <= batch * mean
    ]
    prompts = [
        (tokens, context, 0)
        for tokens in sorted(chunks | whole)
        for context in (0, longest // 4, longest // 2)
        if not context or (tokens in chunks and context + tokens <= longest)
    ]
    prompts += [
        (tokens, 0, decodes)
        for tokens in sorted({max(chunks, default=1), max(whole)})
        for decodes in sorted({most // 2, most - 1} - {0})
    ]
    return [
        *(([], [*enumerate(each, start=1)]) for each in contexts),
        *(
            ([(0, tokens, context, 1)], [*enumerate([mean] * decodes, start=1)])
            for tokens, context, decodes in prompts
        ),
    ]
