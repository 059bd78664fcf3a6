"""Recorded decisions of an engine's scheduler, replayed through ours, call by call.

A log (``*.jsonl``, also gzipped) holds a header, a JSON object, and then one event a line in the
order in which they happened, so that a replay needs no clock::

    ["add", ID]                          a request arrived
    ["schedule", STEP, [[ID, COMPUTED, TOKENS], ...], [PREEMPTED IDS], FREE, RUNNING, WAITING]
    ["return", STEP, [FINISHED IDS]]     that batch's result was booked

The header's ``config`` holds vLLM's settings, its ``requests`` rows of id, arrival, prompt tokens,
output tokens, priority, prefix group or -1, prefix tokens and, where EOS ends it, max_tokens.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.kv import Blocks, CachedBlocks
from sarathi_sim.policies.pool import Pool
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.profiler.storage.files import LARGEST_DATA, open_file, unzipped
from sarathi_sim.profiler.storage.strict import did_you_mean, one_line, show

_MOST = {
    "block_size": 1 << 16,
    "num_blocks": 1 << 40,
    "max_num_seqs": 1 << 40,
    "max_num_batched_tokens": 1 << 40,
    "max_model_len": 1 << 40,
    "pp": 1 << 16,
}
"""Settings that are whole numbers from 1 on, and the largest they may be."""
_SWITCHES = ("chunked", "caching", "adaptive", "reserve_full_isl", "async_sched", "v2")
_KNOWN = {*_MOST, *_SWITCHES, "policy", "threshold", "watermark"}
"""Every setting that decides."""
_OF_TRAFFIC = {"requests", "per_second", "longest_prompt", "longest_output", "share", "eos", "ties"}
"""What the recorder keeps beside them: how it drew the requests, which stand in the header."""
_VERSION = "0.32"
"""The vLLM whose decisions ours are. They change between minor releases."""
_Count = Annotated[int, Field(strict=True, ge=1, le=1 << 24)]
_Whole = Annotated[int, Field(strict=True, ge=-1, le=1 << 40)]
_Time = Annotated[float, Field(ge=0, le=1e12)]
_ROWS = TypeAdapter(
    list[
        tuple[_Whole, _Time, _Count, _Count, _Whole, _Whole, _Whole]
        | tuple[_Whole, _Time, _Count, _Count, _Whole, _Whole, _Whole, _Count]
    ]
)
_Chunk = tuple[_Whole, _Whole, _Whole]
_EVENTS: TypeAdapter[Any] = TypeAdapter(
    list[
        tuple[Literal["add"], _Whole]
        | tuple[Literal["schedule"], _Whole, list[_Chunk], list[_Whole], _Whole, _Whole, _Whole]
        | tuple[Literal["return"], _Whole, list[_Whole]]
    ]
)


@dataclass(frozen=True)
class DecisionLog:
    """A recorded log: its file, how many batches may be in flight, settings, requests, events."""

    path: Path
    depth: int
    settings: dict[str, Any]
    requests: list[list[Any]]
    events: list[list[Any]]

    @property
    def name(self) -> str:
        """The file's name, without what says of which kind it is."""
        return self.path.name.removesuffix(".gz").removesuffix(".jsonl")


@dataclass(frozen=True)
class Replay:
    """The result of a replay: calls of the scheduler, identical decisions, and the first
    difference.

    A difference that is not in a decision (a request that ends elsewhere) counts, too.
    """

    decisions: int
    identical: int
    first_difference: str | None


def read_log(path: Path) -> DecisionLog:
    """Raises ConfigError, naming file and line, where it is not such a log."""
    try:
        with open_file(path) as file:
            content = unzipped(file).read(LARGEST_DATA + 1)
        if len(content) > LARGEST_DATA:
            raise ConfigError(f"{path}: holds more than {LARGEST_DATA >> 20} MiB")
        lines = content.decode().splitlines()
    except EOFError:
        raise ConfigError(f"{path}: not a log of decisions: it is cut short") from None
    except (zlib.error, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a log of decisions: {error}") from None
    rows = [_parsed(path, number, line) for number, line in enumerate(lines, 1)]
    if not rows or not isinstance(rows[0], dict) or rows[0].get("format") != 1:
        raise ConfigError(f"{path}: line 1: not the header of a log (an object with format 1)")
    header = rows[0]
    if header.get("engine") != "vllm":
        raise ConfigError(f"{path}: line 1: engine {show(header.get('engine'))}: must be 'vllm'")
    if not str(header.get("version")).startswith(f"{_VERSION}."):
        problem = f"must be {_VERSION}.x, whose decisions the policy vllm makes"
        raise ConfigError(f"{path}: line 1: version {show(header.get('version'))}: {problem}")
    try:
        log = DecisionLog(
            path, header["depth"], dict(header["config"]), list(header["requests"]), rows[1:]
        )
    except KeyError as error:
        raise ConfigError(f"{path}: line 1: the key {error.args[0]} is missing") from None
    except (TypeError, ValueError):
        problem = "config must hold keys and values, and requests a list of rows"
        raise ConfigError(f"{path}: line 1: {problem}") from None
    _check(log)
    return log


def _check(log: DecisionLog) -> None:
    """Raises ConfigError for a setting that vLLM does not allow."""
    where = f"{log.path}: line 1"
    for name in log.settings:
        if name not in _KNOWN | _OF_TRAFFIC:
            close = did_you_mean(name, _KNOWN)
            raise ConfigError(f"{where}: config.{name}: a setting that is not modelled{close}")
    found = {name: log.settings.get(name) for name in _MOST} | {"depth": log.depth}
    for name, value in found.items():
        most = _MOST.get(name, 1 << 16)
        if type(value) is not int or not 1 <= value <= most:
            problem = f"must be a whole number from 1 to {most}"
            raise ConfigError(f"{where}: {name} {show(value)}: {problem}")
    policy = log.settings.get("policy")
    if policy not in ("fcfs", "priority"):
        raise ConfigError(f"{where}: policy {show(policy)}: must be fcfs or priority")
    for name in _SWITCHES:
        if not isinstance(log.settings.get(name), bool):
            value = show(log.settings.get(name))
            raise ConfigError(f"{where}: {name} {value}: must be true or false")
    for name in ("threshold", "watermark"):
        given = log.settings.get(name, -1)
        if type(given) not in (int, float) or not 0 <= given <= 1 << 40:
            raise ConfigError(f"{where}: {name} {show(given)}: must be a number from 0")
    try:
        _ROWS.validate_python(log.requests)
    except ValidationError as error:
        number = error.errors()[0]["loc"][0]
        row = show(log.requests[int(number)])
        problem = "must be the numbers that docs/lockstep.md names"
        raise ConfigError(f"{where}: requests: row {number}: {row}: {problem}") from None
    try:
        _EVENTS.validate_python(log.events)
    except ValidationError as error:
        line = int(error.errors()[0]["loc"][0]) + 2
        problem = "not an event: must be add, schedule or return, as docs/lockstep.md has them"
        raise ConfigError(f"{log.path}: line {line}: {problem}") from None


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: line {number}: not JSON: {error}") from None


def replay(log: DecisionLog) -> Replay:
    """Feed the log's arrivals and returns to our scheduler, and compare every decision.

    Raises ConfigError where the log's settings or requests cannot be used.
    """
    line = 1
    try:
        player = _Player(log)
        for line, event in enumerate(log.events, 2):
            difference = player.play(event)
            if difference is not None:
                return Replay(player.decisions, player.identical, f"line {line}, {difference}")
    except KeyError as error:
        problem = f"request or step {error.args[0]} is unknown here"
        raise ConfigError(f"{log.path}: line {line}: cannot be replayed: {problem}") from None
    except (IndexError, TypeError, ValueError) as error:
        problem = f"cannot be replayed: {one_line(error)}"
        raise ConfigError(f"{log.path}: line {line}: {problem}") from None
    return Replay(player.decisions, player.identical, None)


class _Player:
    """Our scheduler under the settings of a log."""

    def __init__(self, log: DecisionLog) -> None:
        c = log.settings
        self.decisions = sum(event[0] == "schedule" for event in log.events)
        self.identical = 0
        self._flight: dict[int, Batch] = {}
        longest = c["max_model_len"]
        self._requests: dict[int, Request] = {}
        for row in log.requests:
            id, arrival, prompt, output, priority, group, shared = row[:7]
            most = longest - prompt  # the longest sequences end by their length
            declared = min(row[7] if len(row) > 7 else output, most)
            prefix = ((("group", group), shared),) if group >= 0 else ()
            self._requests[id] = Request(
                id, arrival, prompt, min(output, declared), declared, priority, prefix
            )
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
        )
        blocks = CachedBlocks if c["caching"] else Blocks
        self._pool = Pool(
            policy,
            blocks(c["num_blocks"], c["block_size"]),
            max_in_flight=log.depth,
            max_length=longest,
            # Decodes of one sequence are a pipeline apart with Model Runner V2 only.
            stages=c["pp"] if c["v2"] else 1,
        )

    def play(self, event: list[Any]) -> str | None:
        """Feed an event; returns how we differ from it."""
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
        """A decision of ours, as a log states it."""
        pool = self._pool
        before = list(pool.running)
        batch = pool.form()
        rows = [(s.order, s.id, context, tokens) for s, tokens, context in batch.chunks]
        rows += [(s.order, s.id, s.offset + batch.iteration, 1) for s in batch.decodes]
        preempted = sorted(s.id for s in before if s not in pool.running)
        state = [pool.blocks.free, len(pool.running), len(pool.waiting)]
        return [[list(row[1:]) for row in sorted(rows)], preempted, *state], batch
