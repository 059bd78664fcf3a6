"""Decisions of real engines' schedulers beside ours, call by call: recorded logs, whose form is in
docs/lab/lockstep.md; and the simulator's own loop with measured times (:func:`play_back`)."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import simpy
from pydantic import Field, TypeAdapter, ValidationError

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.kv import Blocks, CachedBlocks
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.radix import RadixBlocks
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import OutputLengths, Scheduler
from sarathi_sim.policies.sglang import Sglang
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.profiler.engine.driver import Decision
from sarathi_sim.profiler.storage.files import LARGEST_DATA, open_file, unzipped
from sarathi_sim.profiler.storage.strict import UserError, one_line, parse, show, strict_dataclass
from sarathi_sim.simulator.loop.clock import ARRIVAL, Moment, quantize
from sarathi_sim.simulator.loop.pipeline import scan
from sarathi_sim.simulator.loop.records import Floats, Records, ReplicaLog, Switches
from sarathi_sim.simulator.loop.replica import Replica

_OF_TRAFFIC = {
    "requests", "per_second", "longest_prompt", "longest_output", "share", "shared_prefix", "eos",
    "ties", "rate", "min_prompt", "max_prompt", "min_output", "max_output", "groups", "transfer",
    "k", "accept",
}  # fmt: skip
"""Keys that recorders add to the settings: how they drew the requests, which are in the header."""
_TRUTH = {"True": True, "False": False}
"""Recorders take settings from their command line, and write some down as text."""
_MANY = 1 << 40
_Count = Annotated[int, Field(strict=True, ge=1, le=1 << 24)]
_Large = Annotated[int, Field(strict=True, ge=1, le=_MANY)]
_Whole = Annotated[int, Field(strict=True, ge=-1, le=_MANY)]
_Time = Annotated[float, Field(ge=0, le=1e12)]
_Tokens = Annotated[int, Field(ge=0, le=_MANY)]
_Share = Annotated[float, Field(ge=0, le=_MANY)]
_Row = tuple[_Whole, _Time, _Count, _Count, _Whole, _Whole, _Whole]
_RowWithMost = tuple[_Whole, _Time, _Count, _Count, _Whole, _Whole, _Whole, _Count]
_Chunks = list[tuple[_Whole, _Whole, _Whole]]
_Drafted = list[tuple[_Whole, _Whole, _Whole, _Whole]]
_Ids = list[_Whole]
_Add = tuple[Literal["add"], _Whole]
_Schedule = Literal["schedule"]
_Return = tuple[Literal["return"], _Whole, _Ids]


@strict_dataclass
class VllmSettings:
    """What matters of vLLM's settings; ``depth`` is how many batches may be in flight."""

    depth: _Count
    block_size: _Count
    num_blocks: _Large
    max_num_seqs: _Large
    max_num_batched_tokens: _Large
    max_model_len: _Large
    pp: _Count
    policy: Literal["fcfs", "priority"]
    chunked: bool
    caching: bool
    adaptive: bool
    reserve_full_isl: bool
    async_sched: bool
    v2: bool
    threshold: _Tokens
    watermark: _Share


@strict_dataclass
class SpeculationSettings(VllmSettings):
    """Those of vLLM with a drafter, too."""

    k: _Count
    lookahead: _Tokens = 0
    draft_slots: _Tokens = 0


@strict_dataclass
class SglangSettings:
    """What matters of SGLang's settings."""

    page_size: _Count
    capacity: _Large
    context_length: _Large
    disable_radix_cache: bool
    chunked_prefill_size: Annotated[int, Field(ge=-1, le=_MANY)]
    max_prefill_tokens: _Large
    max_running_requests: _Large
    scheduler_recv_interval: _Large
    schedule_conservativeness: _Share
    schedule_policy: Literal["fcfs", "lpm", "lof"]
    enable_mixed_chunk: bool
    disable_overlap_schedule: bool
    ignore_eos: bool = False


@dataclass(frozen=True)
class DecisionLog:
    """A recorded log: its file, engine, version, mode ("" without), settings, requests, events."""

    path: Path
    engine: str
    version: Any
    mode: str
    settings: Any
    requests: list[list[Any]]
    events: list[list[Any]]

    @property
    def name(self) -> str:
        """The file's name without its suffixes."""
        return self.path.name.removesuffix(".gz").removesuffix(".jsonl")


@dataclass(frozen=True)
class Replay:
    """Calls of the scheduler, identical decisions, and the first difference, which may also be
    outside of a decision (a request that ends in another batch)."""

    decisions: int
    identical: int
    first_difference: str | None


def read_log(path: Path) -> DecisionLog:
    """Read a log. Raises UserError, naming file and line, if the file is not one."""
    try:
        with open_file(path) as file:
            content = unzipped(file).read(LARGEST_DATA + 1)
        if len(content) > LARGEST_DATA:
            raise UserError(f"{path}: holds more than {LARGEST_DATA >> 20} MiB")
        lines = content.decode().splitlines()
    except EOFError:
        raise UserError(f"{path}: not a log of decisions: it is cut short") from None
    except (zlib.error, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a log of decisions: {error}") from None
    parsed = list[Any]()
    for line in lines:
        try:
            parsed.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: line {len(parsed) + 1}: not JSON: {error}") from None
    header, *events = parsed or [0]
    where = f"{path}: line 1"
    if not isinstance(header, dict) or header.get("format") != 1:
        raise UserError(f"{where}: not the header of a log (an object with format 1)")
    engine, mode = header.get("engine"), header.get("mode")
    known_as = str(engine if mode is None else f"{engine} {mode}")
    if known_as not in ENGINES:
        engines = [repr(each) for each in ENGINES if (" " in each) == (mode is not None)]
        raise UserError(f"{where}: engine {known_as!r}: must be {' or '.join(engines)}")
    versions, version = VERSIONS[str(engine)], header.get("version")
    same = next((each for each in versions if f"{version}.".startswith(f"{each}.")), None)
    if same is None:
        problem = f"must be {' or '.join(versions)}, whose decisions the policy {engine} makes"
        raise UserError(f"{where}: version {show(version)}: {problem}")
    config, requests = header.get("config"), header.get("requests")
    if not isinstance(config, dict) or not isinstance(requests, list):
        raise UserError(f"{where}: config must hold keys and values, and requests a list of rows")
    player, kind = ENGINES[known_as]
    names = {field.name for field in fields(kind)}
    if "depth" in names:
        config = config | {"depth": header.get("depth")}
    known = {
        key: _TRUTH.get(str(value), value)
        for key, value in config.items()
        if key in names or key not in _OF_TRAFFIC
    }
    settings = parse(kind, known, f"{where}: config")
    if (number := _first_wrong(list[_Row | _RowWithMost], requests)) is not None:
        problem = "must be the numbers that docs/lab/lockstep.md names"
        raise UserError(f"{where}: requests: row {number}: {show(requests[number])}: {problem}")
    if (number := _first_wrong(player.events, events)) is not None:
        problem = "not an event: must be one of those that docs/lab/lockstep.md has"
        raise UserError(f"{path}: line {number + 2}: {problem}")
    return DecisionLog(path, str(engine), same, mode or "", settings, requests, events)


def _first_wrong(kind: Any, rows: list[Any]) -> int | None:
    try:
        TypeAdapter(kind).validate_python(rows)
    except ValidationError as error:
        return int(error.errors()[0]["loc"][0])
    return None


def replay(log: DecisionLog) -> Replay:
    """Feed the log's arrivals and returns to our scheduler, and compare every decision. Raises
    UserError where the log's settings or requests cannot be used."""
    line = 1
    try:
        player = ENGINES[f"{log.engine} {log.mode}".rstrip()][0](log)
        for line, event in enumerate(log.events, 2):
            difference = player.play(event)
            if difference is not None:
                return Replay(player.decisions, player.identical, f"line {line}, {difference}")
    except (LookupError, TypeError, ValueError) as error:
        unknown = isinstance(error, KeyError)
        why = f"request or step {error.args[0]} is unknown here" if unknown else one_line(error)
        raise UserError(f"{log.path}: line {line}: cannot be replayed: {why}") from None
    return Replay(player.decisions, player.identical, None)


class _Player:
    """Our scheduler under the settings of a log; a subclass for each engine. ``events`` are the
    forms of all events."""

    events: ClassVar[Any]

    def __init__(self, log: DecisionLog) -> None:
        self.decisions = sum(event[0] == "schedule" for event in log.events)
        self.identical = 0
        self._flight: dict[int, Batch] = {}
        self._requests: dict[int, Request] = {}
        remote = log.mode in _REMOTE
        for row in log.requests:
            id, arrival, prompt, output, priority, group, shared = row[:7]
            declared = min(row[7] if len(row) > 7 else output, self._most(log.settings, prompt))
            longest = getattr(log.settings, "ignore_eos", False)
            output = declared if longest else min(output, declared)
            prefix = ((("group", group), shared),) if group >= 0 else ()
            # All of the prompt but its last token, which the engine computes itself.
            elsewhere = prompt - 1 if remote else 0
            self._requests[id] = Request(
                id, arrival, prompt, output, declared, priority, prefix, remote_tokens=elsewhere
            )
        self._pool = self._build(log)

    def _most(self, c: Any, prompt: int) -> int:
        """The output tokens that the engine allows a request."""
        raise NotImplementedError

    def _build(self, log: DecisionLog) -> Pool:
        raise NotImplementedError

    def play(self, event: list[Any]) -> str | None:
        """Feed an event; returns the difference of our decision from it, in words, or None."""
        if event[0] == "add":
            reason = self._pool.add(self._requests[event[1]])
            return reason and f"request {event[1]} is rejected: {reason}"
        if event[0] == "schedule":
            ours, self._flight[event[1]] = self._schedule()
            theirs, what = event[2:], "decision"
        else:
            ended = self._pool.complete(self._flight.pop(event[1]))
            ours, theirs = sorted(s.id for s in ended), event[2]
            what = "return"
        if ours != theirs:
            return f"{what} of step {event[1]}: engine {theirs}; ours {ours}"
        self.identical += event[0] == "schedule"
        return None

    def _schedule(self) -> tuple[list[Any], Batch]:
        pool = self._pool
        before = list(pool.running)
        batch = pool.form()
        rows = [(s.order, s.id, context, n) for s, n, context in batch.chunks + batch.verified]
        if not batch.verified:
            rows += [(s.order, s.id, s.offset + batch.iteration, 1) for s in batch.decodes]
        preempted = sorted(s.id for s in before if s not in pool.running)
        return self._stated(
            batch,
            [list(row[1:]) for row in sorted(rows)],
            preempted,
        ), batch

    def _stated(self, batch: Batch, rows: list[list[int]], preempted: list[int]) -> list[Any]:
        pool = self._pool
        return [
            rows,
            preempted,
            pool.blocks.free,
            len(pool.running),
            len(pool.waiting),
        ]


class _VllmPlayer(_Player):
    events: ClassVar[Any] = list[
        _Add | tuple[_Schedule, _Whole, _Chunks, _Ids, _Whole, _Whole, _Whole] | _Return
    ]

    def _most(self, c: Any, prompt: int) -> int:
        return int(c.max_model_len) - prompt  # generation stops at this length

    def _build(self, log: DecisionLog) -> Pool:
        c = log.settings
        policy = Vllm(
            max_num_batched_tokens=c.max_num_batched_tokens,
            max_num_seqs=c.max_num_seqs,
            long_prefill_token_threshold=c.threshold or None,
            adaptive_threshold=c.adaptive,
            enable_chunked_prefill=c.chunked,
            scheduling_policy=c.policy,
            watermark=c.watermark,
            scheduler_reserve_full_isl=c.reserve_full_isl,
            async_scheduling=c.async_sched,
            version=log.version,
        )
        blocks = (CachedBlocks if c.caching else Blocks)(c.num_blocks, c.block_size)
        # Only with Model Runner V2 two decodes of a sequence are a whole pipeline apart.
        stages = c.pp if c.v2 else 1
        sizes = {"max_in_flight": c.depth, "max_length": c.max_model_len, "stages": stages}
        return Pool(policy, blocks, **sizes)


class _VllmModePlayer(_VllmPlayer):
    """vLLM that drafts, or whose prompts are computed elsewhere: what was proposed, accepted and
    received is fed from the log."""

    events: ClassVar[Any] = list[
        _Add
        | tuple[_Schedule, _Whole, _Drafted, _Ids, _Whole, _Whole, _Whole, _Whole]
        | tuple[Literal["return"], _Whole, _Ids, dict[str, _Whole]]
        | tuple[Literal["recv"], _Ids]
        | tuple[Literal["drafts"], dict[str, _Whole]]
    ]
    _yielded: Mapping[str, int] = {}

    def _build(self, log: DecisionLog) -> Pool:
        pool, c = super()._build(log), log.settings
        if log.mode == "decode_bench":
            pool.policy.load_kv_async = False  # type: ignore[attr-defined]
        if isinstance(c, SpeculationSettings):
            pool.draft_length, pool.lookahead, pool.draft_slots = c.k, c.lookahead, c.draft_slots
            pool.endings = OutputLengths(lambda id, at, drafts: self._yielded.get(str(id), 1) - 1)
        return pool

    def play(self, event: list[Any]) -> str | None:
        if event[0] == "recv":
            self._pool.received(event[1])
            return None
        if event[0] == "drafts":
            for sequence, drafts in self._pool.drafting.items():
                self._pool.drafting[sequence] = event[1].get(str(sequence.id), drafts)
            return None
        if event[0] == "return":
            self._yielded = event[3]
        return super().play(event)

    def _stated(self, batch: Batch, rows: list[list[int]], preempted: list[int]) -> list[Any]:
        drafts = {sequence.id: tokens - 1 for sequence, tokens, _ in batch.verified}
        rows = [[*row, drafts.get(row[0], 0)] for row in rows]
        return [*super()._stated(batch, rows, preempted), len(self._pool.loading)]


class _SglangPlayer(_Player):
    events: ClassVar[Any] = list[
        _Add
        | tuple[
            _Schedule, _Whole, Literal["extend", "mixed", "decode"] | None, _Chunks, _Ids,
            _Whole, _Whole, _Whole, float, _Whole, bool,
        ]
        | _Return
    ]  # fmt: skip
    _idle = 0  # rounds of the engine's loop without any request
    _nothing = False  # whether the last decision was to do nothing

    def _most(self, c: Any, prompt: int) -> int:
        paged = -(-prompt // c.page_size) * c.page_size
        longest = min(c.context_length, c.capacity) - 1
        return int(min(longest - prompt - 1, c.capacity - paged - c.page_size - 1))

    def _build(self, log: DecisionLog) -> Pool:
        c = log.settings
        of_memory = ("page_size", "capacity", "context_length", "disable_radix_cache")
        keys = {name: value for name, value in vars(c).items() if name not in of_memory}
        if c.chunked_prefill_size == -1:
            keys["chunked_prefill_size"] = None
        kind = Blocks if c.disable_radix_cache else RadixBlocks
        blocks = kind(c.capacity // c.page_size + 1, c.page_size)
        in_flight = 1 if c.disable_overlap_schedule else 2
        return Pool(Sglang(**keys), blocks, max_in_flight=in_flight, max_length=c.context_length)

    def _schedule(self) -> tuple[list[Any], Batch]:
        # The loop makes one more round without requests only if none ended in its last step.
        self._pool.emptied = self._idle
        stated, batch = super()._schedule()
        nothing = not stated[1]
        if nothing and not self._pool.num_unfinished:
            self._idle += self._nothing or not self._pool.policy.ahead
        self._nothing = nothing
        return stated, batch

    def _stated(self, batch: Batch, rows: list[list[int]], preempted: list[int]) -> list[Any]:
        pool, state = self._pool, self._pool.state
        kinds = ("extend", "mixed") if batch.chunks else (None, "decode")
        free = pool.blocks.free * pool.blocks.block_size
        counts = [free, state["decoding"], len(pool.waiting)]
        cut = next((sequence.id for sequence in pool.partials), -1)
        memory = [round(state["ratio"], 6), cut, bool(state["full"])]
        return [kinds[batch.num_decodes > 0], rows, preempted, *counts, *memory]


VERSIONS = {"vllm": ("0.32", "0.33"), "sglang": ("0.5.23",)}
"""The releases that our policies reproduce: decisions change between minor ones."""
ENGINES: dict[str, tuple[type[_Player], type[Any]]] = {
    "vllm": (_VllmPlayer, VllmSettings),
    "vllm pd": (_VllmModePlayer, VllmSettings),
    "vllm decode_bench": (_VllmModePlayer, VllmSettings),
    "vllm spec": (_VllmModePlayer, SpeculationSettings),
    "vllm pd spec": (_VllmModePlayer, SpeculationSettings),
    "sglang": (_SglangPlayer, SglangSettings),
}
"""Player and settings by the engine's name in the header, and its mode if it has one."""
_REMOTE = ("pd", "decode_bench", "pd spec")


def play_back(
    requests: Sequence[Request],
    scheduler: Scheduler,
    service: Floats,
    send: Floats,
    turnaround: Floats,
    clock: Floats | None = None,
) -> tuple[list[Decision], Records]:
    """Serve the requests on one :class:`~sarathi_sim.simulator.loop.replica.Replica` with recorded
    times; returns the batches (whose clocks are 0) and the records.

    Seconds of each micro-batch in launch order: ``service`` on each stage, shape (batches, stages);
    ``send`` from stage 0 to 1, 1 to 2, ..., shape (batches, stages - 1); ``turnaround`` from the
    last stage's finish until the scheduler had handled the return, shape (batches,).

    A batch is formed at its recorded ``clock``: then scheduler and loop must form the engine's
    batches (*lock-step*). Without it it is formed when stage 0 is free: with the busy times of the
    stages, the difference from the measurement is what the recurrence does not model (*replay*).
    If there are fewer records than batches, the last record serves the rest.
    """
    service, send, turnaround = (quantize(each) for each in (service, send, turnaround))
    opens = None if clock is None else [*quantize(clock).tolist(), math.inf]
    formed: list[Decision] = []

    def predict(batch: Batch) -> tuple[float, float, float, float]:
        """For the log's columns, which hold one transfer time: the mean of all links."""
        sends = send[min(len(formed), len(send) - 1)]
        return 1.0, 0.0, 0.0, float(sends.mean()) if len(sends) else 0.0

    def serve(batch: Batch, nominal: object) -> tuple[list[float], list[float], float]:
        row = min(len(formed), len(service) - 1)
        formed.append(Decision.of(batch, 0.0))
        return service[row].tolist(), send[row].tolist(), float(turnaround[row])

    env = simpy.Environment()
    replica = Replica(
        env,
        scheduler,
        predict,
        (1,) * service.shape[1],
        Switches(lazy=True, turnaround_s=float(turnaround[-1])),
        service=serve,
        opens=None if opens is None else lambda: opens[min(len(formed), len(opens) - 1)],
    )
    rejections: dict[int, str] = {}

    def arrive(event: Moment) -> None:
        request: Any = event._value
        if (reason := replica.submit(request)) is not None:
            rejections[request.id] = reason

    for request in requests:
        Moment(env, float(quantize(request.arrival_s)), ARRIVAL, arrive, request)
    env.run()
    log = replica.log()
    assert log.stage_s is not None
    rows = np.minimum(np.arange(log.num_iterations), len(send) - 1)
    # One mean transfer time could not reproduce them.
    times = scan(log.iterations["ready_s"], log.stage_s, send[rows], False)
    return formed, records_of_one(requests, rejections, replace(log, measured=times))


def records_of_one(
    requests: Sequence[Request], rejections: dict[int, str], log: ReplicaLog
) -> Records:
    """The records of requests that one replica served."""
    rows = [
        (r.id, r.prompt_tokens, r.output_tokens, -(r.id in rejections), r.arrival_s)
        for r in sorted(requests, key=lambda request: request.id)
    ]
    *whole, arrival_s = np.array(rows, np.float64).T
    id, prompt, output, replica = (column.astype(np.int64) for column in whole)
    return Records(id, quantize(arrival_s), prompt, output, replica, rejections, [log])
