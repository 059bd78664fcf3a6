"""Recorded decisions of an engine's scheduler, replayed through ours, call by call.

A log (``*.jsonl``, also gzipped) holds a header, a JSON object, and then one event a line in the
order in which they happened, so that a replay needs no clock::

    ["add", ID]                          a request arrived
    ["schedule", STEP, ...]              a decision: what the engine's ``state`` has
    ["return", STEP, [FINISHED IDS]]     that batch's result was booked

The header's ``config`` holds the engine's settings, its ``requests`` rows of id, arrival, prompt
tokens, output tokens, priority, prefix group or -1, prefix tokens and, where EOS ends it,
max_tokens. The header may have a ``mode``: ``spec`` with speculation; ``pd`` if prompts are
computed elsewhere, ``decode_bench`` if their KV arrives at once then; ``pd spec`` with both. Then a
row of a decision has its drafts, its state the number of requests that hold blocks for KV and do
not run, a return the tokens of each request that did not get exactly one, and there are::

    ["recv", [IDS]]                      the KV of these requests' prompts arrived from elsewhere
    ["drafts", {ID: N}]                  drafts proposed after that return
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.kv import Blocks, CachedBlocks
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.radix import RadixBlocks
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.scheduler import OutputLengths
from sarathi_sim.policies.sglang import Sglang
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.profiler.storage.files import LARGEST_DATA, open_file, unzipped
from sarathi_sim.profiler.storage.strict import UserError, did_you_mean, one_line, show

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
_Whole = Annotated[int, Field(strict=True, ge=-1, le=_MANY)]
_Time = Annotated[float, Field(ge=0, le=1e12)]
_ROWS = TypeAdapter(
    list[
        tuple[_Whole, _Time, _Count, _Count, _Whole, _Whole, _Whole]
        | tuple[_Whole, _Time, _Count, _Count, _Whole, _Whole, _Whole, _Count]
    ]
)
_Chunks = list[tuple[_Whole, _Whole, _Whole]]
_Drafted = list[tuple[_Whole, _Whole, _Whole, _Whole]]
_Ids = list[_Whole]


@dataclass(frozen=True)
class DecisionLog:
    """A recorded log: its file and engine, how many batches may be in flight, settings, requests,
    events."""

    path: Path
    engine: type[_Player]
    version: Any
    depth: int
    settings: dict[str, Any]
    requests: list[list[Any]]
    events: list[list[Any]]

    @property
    def name(self) -> str:
        """The file's name without its suffixes."""
        return self.path.name.removesuffix(".gz").removesuffix(".jsonl")


@dataclass(frozen=True)
class Replay:
    """The result of a replay: calls of the scheduler, identical decisions, and the first
    difference.

    A difference outside of a decision (a request that ends in another batch) counts, too.
    """

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
    rows = [_parsed(path, number, line) for number, line in enumerate(lines, 1)]
    if not rows or not isinstance(rows[0], dict) or rows[0].get("format") != 1:
        raise UserError(f"{path}: line 1: not the header of a log (an object with format 1)")
    header = rows[0]
    name, version = header.get("engine"), str(header.get("version"))
    mode = header.get("mode")
    known_as = name if mode is None else f"{name} {mode}"
    engine = ENGINES.get(str(known_as))
    if engine is None:
        engines = [repr(each) for each in ENGINES if (" " in each) == (mode is not None)]
        problem = f"must be {' or '.join(engines)}"
        raise UserError(f"{path}: line 1: engine {show(known_as)}: {problem}")
    known = next((each for each in engine.versions if f"{version}.".startswith(f"{each}.")), None)
    if known is None:
        problem = f"must be {' or '.join(engine.versions)}, whose decisions the policy {name} makes"
        raise UserError(f"{path}: line 1: version {show(header.get('version'))}: {problem}")
    try:
        given = {key: _TRUTH.get(str(value), value) for key, value in header["config"].items()}
        config, requests = engine.defaults | given, list(header["requests"])
        depth = header["depth"] if name == "vllm" else 2 - bool(config["disable_overlap_schedule"])
        log = DecisionLog(path, engine, known, depth, config, requests, rows[1:])
    except KeyError as error:
        raise UserError(f"{path}: line 1: the key {error.args[0]} is missing") from None
    except (TypeError, ValueError):
        problem = "config must hold keys and values, and requests a list of rows"
        raise UserError(f"{path}: line 1: {problem}") from None
    _check(log)
    return log


def _check(log: DecisionLog) -> None:
    """Raises UserError for a setting that the engine does not allow."""
    where, engine = f"{log.path}: line 1", log.engine
    for name in log.settings:
        if name not in engine.settings and name not in _OF_TRAFFIC:
            close = did_you_mean(name, set(engine.settings))
            raise UserError(f"{where}: config.{name}: a setting that is not modelled{close}")
    for name, allowed in {"depth": 1 << 16, **engine.settings}.items():
        value = log.depth if name == "depth" else log.settings.get(name)
        if problem := _problem(value, allowed):
            raise UserError(f"{where}: {name} {show(value)}: must be {problem}")
    try:
        _ROWS.validate_python(log.requests)
    except ValidationError as error:
        number = error.errors()[0]["loc"][0]
        row = show(log.requests[int(number)])
        problem = "must be the numbers that docs/lockstep.md names"
        raise UserError(f"{where}: requests: row {number}: {row}: {problem}") from None
    try:
        add: Any = tuple[Literal["add"], _Whole]
        decision = tuple.__class_getitem__((Literal["schedule"], _Whole, *engine.state))
        events: Any = list.__class_getitem__(add | decision | engine.events)
        TypeAdapter(events).validate_python(log.events)
    except ValidationError as error:
        line = int(error.errors()[0]["loc"][0]) + 2
        problem = "not an event: must be one of those that docs/lockstep.md has"
        raise UserError(f"{log.path}: line {line}: {problem}") from None


def _problem(value: Any, allowed: Any) -> str | None:
    """The allowed values of a setting, in words, if ``value`` is not one; else None. ``allowed`` is
    `bool`, a tuple of values, a float (a lower bound) or an int (whole numbers from 1 up to it)."""
    if allowed is bool:
        return None if isinstance(value, bool) else "true or false"
    if isinstance(allowed, tuple):
        return None if value in allowed else " or ".join(allowed)
    if isinstance(allowed, float):
        fits = type(value) in (int, float) and allowed <= value <= _MANY
        return None if fits else f"a number from {allowed:.0f}"
    fits = type(value) is int and 1 <= value <= allowed
    return None if fits else f"a whole number from 1 to {allowed}"


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: line {number}: not JSON: {error}") from None


def replay(log: DecisionLog) -> Replay:
    """Feed the log's arrivals and returns to our scheduler, and compare every decision.

    Raises UserError where the log's settings or requests cannot be used.
    """
    line = 1
    try:
        player = log.engine(log)
        for line, event in enumerate(log.events, 2):
            difference = player.play(event)
            if difference is not None:
                return Replay(player.decisions, player.identical, f"line {line}, {difference}")
    except KeyError as error:
        problem = f"request or step {error.args[0]} is unknown here"
        raise UserError(f"{log.path}: line {line}: cannot be replayed: {problem}") from None
    except (IndexError, TypeError, ValueError) as error:
        problem = f"cannot be replayed: {one_line(error)}"
        raise UserError(f"{log.path}: line {line}: {problem}") from None
    return Replay(player.decisions, player.identical, None)


class _Player:
    """Our scheduler under the settings of a log; a subclass for each engine.

    ``versions`` are the releases that our policy reproduces: decisions change between minor ones.
    ``settings`` are the settings that matter, with their allowed values (:func:`_problem`);
    ``defaults`` are for settings that may be missing. ``state`` names the fields of a decision, and
    ``events`` the forms of the other events but arrivals. With ``remote`` all of a prompt but its
    last token, which the engine computes itself, comes from elsewhere.
    """

    versions: ClassVar[tuple[str, ...]]
    settings: ClassVar[dict[str, Any]]
    defaults: ClassVar[dict[str, Any]] = {}
    state: ClassVar[tuple[Any, ...]]
    events: ClassVar[Any] = tuple[Literal["return"], _Whole, _Ids]
    remote: ClassVar[bool] = False

    def __init__(self, log: DecisionLog) -> None:
        self.decisions = sum(event[0] == "schedule" for event in log.events)
        self.identical = 0
        self._flight: dict[int, Batch] = {}
        self._requests: dict[int, Request] = {}
        for row in log.requests:
            id, arrival, prompt, output, priority, group, shared = row[:7]
            declared = min(row[7] if len(row) > 7 else output, self._most(log.settings, prompt))
            output = declared if log.settings.get("ignore_eos") else min(output, declared)
            prefix = ((("group", group), shared),) if group >= 0 else ()
            remote = prompt - 1 if self.remote else 0
            self._requests[id] = Request(
                id, arrival, prompt, output, declared, priority, prefix, remote_tokens=remote
            )
        self._pool = self._build(log)

    def _most(self, c: dict[str, Any], prompt: int) -> int:
        """The output tokens that the engine allows a request."""
        raise NotImplementedError

    def _build(self, log: DecisionLog) -> Pool:
        """Our scheduler."""
        raise NotImplementedError

    def play(self, event: list[Any]) -> str | None:
        """Feed an event; returns the difference of our decision from it, in words, or None."""
        if event[0] == "add":
            reason = self._pool.add(self._requests[event[1]])
            return reason and f"request {event[1]} is rejected: {reason}"
        if event[0] == "schedule":
            ours, self._flight[event[1]] = self._schedule()
            theirs, what = event[2:], "decision"
        elif event[0] == "recv":
            self._pool.received(event[1])
            return None
        else:
            ended = self._pool.complete(self._flight.pop(event[1]))
            ours, theirs = sorted(s.id for s in ended), event[2]
            what = "return"
        if ours != theirs:
            return f"{what} of step {event[1]}: engine {theirs}; ours {ours}"
        self.identical += event[0] == "schedule"
        return None

    def _schedule(self) -> tuple[list[Any], Batch]:
        """Our next decision, in the form of a log."""
        pool = self._pool
        before = list(pool.running)
        batch = pool.form()
        rows = [(s.order, s.id, context, tokens) for s, tokens, context in batch.chunks]
        if batch.verified:
            rows += [(s.order, s.id, context, n) for s, n, context in batch.verified]
        else:
            rows += [(s.order, s.id, s.offset + batch.iteration, 1) for s in batch.decodes]
        preempted = sorted(s.id for s in before if s not in pool.running)
        return self._stated(batch, [list(row[1:]) for row in sorted(rows)], preempted), batch

    def _stated(self, batch: Batch, rows: list[list[int]], preempted: list[int]) -> list[Any]:
        pool = self._pool
        return [rows, preempted, pool.blocks.free, len(pool.running), len(pool.waiting)]


class _VllmPlayer(_Player):
    versions = ("0.32", "0.33")
    settings: ClassVar[dict[str, Any]] = {
        "block_size": 1 << 16, "num_blocks": _MANY, "max_num_seqs": _MANY,
        "max_num_batched_tokens": _MANY, "max_model_len": _MANY, "pp": 1 << 16,
        "policy": ("fcfs", "priority"), "chunked": bool, "caching": bool, "adaptive": bool,
        "reserve_full_isl": bool, "async_sched": bool, "v2": bool, "threshold": 0.0,
        "watermark": 0.0,
    }  # fmt: skip
    state: ClassVar[tuple[Any, ...]] = (_Chunks, _Ids, _Whole, _Whole, _Whole)

    def _most(self, c: dict[str, Any], prompt: int) -> int:
        return int(c["max_model_len"]) - prompt  # generation stops at this length

    def _build(self, log: DecisionLog) -> Pool:
        c = log.settings
        policy = Vllm(
            max_num_batched_tokens=c["max_num_batched_tokens"],
            max_num_seqs=c["max_num_seqs"],
            long_prefill_token_threshold=c["threshold"] or None,
            adaptive_threshold=c["adaptive"],
            enable_chunked_prefill=c["chunked"],
            scheduling_policy=c["policy"],
            watermark=c["watermark"],
            scheduler_reserve_full_isl=c["reserve_full_isl"],
            async_scheduling=c["async_sched"],
            version=log.version,
        )
        blocks = CachedBlocks if c["caching"] else Blocks
        return Pool(
            policy,
            blocks(c["num_blocks"], c["block_size"]),
            max_in_flight=log.depth,
            max_length=c["max_model_len"],
            # Only with Model Runner V2 two decodes of a sequence are a whole pipeline apart.
            stages=c["pp"] if c["v2"] else 1,
        )


class _MorePlayer(_VllmPlayer):
    """vLLM in any of its modes."""

    state = (_Drafted, _Ids, _Whole, _Whole, _Whole, _Whole)
    events = (
        tuple[Literal["return"], _Whole, _Ids, dict[str, _Whole]]
        | tuple[Literal["recv"], _Ids]
        | tuple[Literal["drafts"], dict[str, _Whole]]
    )

    def _stated(self, batch: Batch, rows: list[list[int]], preempted: list[int]) -> list[Any]:
        drafts = {sequence.id: tokens - 1 for sequence, tokens, _ in batch.verified}
        rows = [[*row, drafts.get(row[0], 0)] for row in rows]
        return [*super()._stated(batch, rows, preempted), self._pool.holding]


class _RemotePlayer(_MorePlayer):
    """vLLM whose prompts are computed elsewhere."""

    remote = True


class _BenchPlayer(_RemotePlayer):
    """vLLM with its own connector for benchmarks, whose KV arrives at once."""

    def _build(self, log: DecisionLog) -> Pool:
        pool = super()._build(log)
        pool.policy.load_kv_async = False  # type: ignore[attr-defined]
        return pool


class _SpeculationPlayer(_MorePlayer):
    """vLLM that drafts: what was proposed and accepted is fed from the log."""

    settings: ClassVar[dict[str, Any]] = {
        **_VllmPlayer.settings,
        "k": 1 << 10,
        "lookahead": 0.0,
        "draft_slots": 0.0,
    }
    defaults: ClassVar[dict[str, Any]] = {"lookahead": 0, "draft_slots": 0}

    def _build(self, log: DecisionLog) -> Pool:
        self._yielded: dict[str, int] = {}
        pool = super()._build(log)
        pool.draft_length, pool.lookahead = log.settings["k"], log.settings["lookahead"]
        pool.draft_slots = log.settings["draft_slots"]
        pool.endings = OutputLengths(lambda id, at, drafts: self._yielded.get(str(id), 1) - 1)
        return pool

    def play(self, event: list[Any]) -> str | None:
        if event[0] == "drafts":
            for sequence in self._pool.drafting:
                drafts = event[1].get(str(sequence.id), self._pool.drafting[sequence])
                self._pool.drafting[sequence] = drafts
            return None
        if event[0] == "return":
            self._yielded = event[3]
        return super().play(event)


class _RemoteSpeculationPlayer(_SpeculationPlayer):
    """vLLM that drafts, and whose prompts are computed elsewhere."""

    remote = True


class _SglangPlayer(_Player):
    _idle = 0  # rounds of the engine's loop without any request
    _nothing = False  # whether the last decision was to do nothing

    versions = ("0.5.23",)
    settings: ClassVar[dict[str, Any]] = {
        "page_size": 1 << 16, "capacity": _MANY, "context_length": _MANY,
        "disable_radix_cache": bool, "chunked_prefill_size": -1.0, "max_prefill_tokens": _MANY,
        "max_running_requests": _MANY, "scheduler_recv_interval": _MANY,
        "schedule_conservativeness": 0.0, "schedule_policy": ("fcfs", "lpm", "lof"),
        "enable_mixed_chunk": bool, "disable_overlap_schedule": bool, "ignore_eos": bool,
    }  # fmt: skip
    defaults: ClassVar[dict[str, Any]] = {"ignore_eos": False}
    state = (
        Literal["extend", "mixed", "decode"] | None, _Chunks, _Ids, _Whole, _Whole, _Whole, float,
        _Whole, bool,
    )  # fmt: skip

    def _most(self, c: dict[str, Any], prompt: int) -> int:
        page, capacity = c["page_size"], c["capacity"]
        paged = -(-prompt // page) * page
        longest = min(c["context_length"], capacity) - 1
        return int(min(longest - prompt - 1, capacity - paged - page - 1))

    def _build(self, log: DecisionLog) -> Pool:
        c = log.settings
        keys = {name: c[name] for name in list(self.settings)[4:]}  # without those of the memory
        if keys["chunked_prefill_size"] == -1:
            keys["chunked_prefill_size"] = None
        policy = Sglang(**keys)
        blocks = Blocks if c["disable_radix_cache"] else RadixBlocks
        return Pool(
            policy,
            blocks(c["capacity"] // c["page_size"] + 1, c["page_size"]),
            max_in_flight=log.depth,
            max_length=c["context_length"],
        )

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
        cut = next((sequence.id for sequence in pool.partials), -1)
        full, ratio = bool(state["full"]), round(state["ratio"], 6)
        decoding, waiting = state["decoding"], len(pool.waiting)
        kind = kinds[batch.num_decodes > 0]
        return [kind, rows, preempted, free, decoding, waiting, ratio, cut, full]


ENGINES: dict[str, type[_Player]] = {
    "vllm": _VllmPlayer,
    "vllm pd": _RemotePlayer,
    "vllm decode_bench": _BenchPlayer,
    "vllm spec": _SpeculationPlayer,
    "vllm pd spec": _RemoteSpeculationPlayer,
    "sglang": _SglangPlayer,
}
"""Players by the engine's name in the header, and its mode if it has one."""
