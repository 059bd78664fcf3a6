"""The requests that a scenario's ``workload`` section describes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from sarathi_sim.policies.request import Prefix, Request
from sarathi_sim.profiler.storage.files import user_path
from sarathi_sim.profiler.storage.strict import SpecError, UserError
from sarathi_sim.simulator.load.requests import (
    WorkloadError,
    at_once,
    burstier,
    draw_groups,
    draw_sessions,
    gamma_arrivals,
    log_uniform,
    longer_prefixes,
    longer_requests,
    make_requests,
    poisson_arrivals,
    quantile_lengths,
    shared_prefixes,
    split_lengths,
    stream,
    uniform_lengths,
    varying_arrivals,
    with_turns_before,
    zipf_lengths,
)
from sarathi_sim.simulator.load.trace import Reading, Trace, read_trace
from sarathi_sim.simulator.loop.clock import HORIZON_S, quantize
from sarathi_sim.simulator.loop.records import Floats, Ints
from sarathi_sim.simulator.loop.simulation import Clients, ClosedLoop, Conversations
from .base import Source
from .scenario import Scenario
from .workload import (
    AtOnce,
    Clip,
    Closed,
    FixedLengths,
    Gamma,
    PdRange,
    Poisson,
    QuantileLengths,
    RandomLengths,
    Sessions,
    TraceArrivals,
    TraceLengths,
    UniformLengths,
    Varying,
    Workload,
    ZipfLengths,
)


def build_clients(scenario: Scenario, requests: Sequence[Request]) -> Clients | None:
    """The clients of sessions and closed loops; None if requests arrive at times of their own. A
    client also waits for the front end: ``frontend_s`` in the mean, exponentially distributed. The
    same delay for all would keep them in step, which measured clients are not."""
    arrivals, sessions = scenario.workload.arrivals, scenario.workload.sessions
    sender = arrivals if sessions is None else sessions
    if not isinstance(sender, Closed | Sessions):
        return None
    drawn = stream(scenario.seed, "think times").exponential(sender.think_s, len(requests))
    waits = stream(scenario.seed, "front end").exponential(1.0, len(requests))
    think_s = quantize(drawn + (scenario.engine.frontend_s or 0.0) * waits)
    if isinstance(sender, Closed):
        return ClosedLoop(sender.clients, think_s)
    arrival_s = quantize(np.array([request.arrival_s for request in requests]))
    return Conversations(_turns(sender, len(requests), scenario.seed), arrival_s, think_s)


@dataclass(frozen=True)
class Lengths:
    """Tokens of each request: its prompt, its output, the declared most of it, and those of the
    prompt that are computed here; whether any has a prefix."""

    prompt: Ints
    output: Ints
    most: Ints
    here: Ints
    prefixed: bool

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Lengths:
        """Of a list of requests; of the :class:`Traffic` of many deployments read once."""
        if isinstance(requests, Traffic):
            return requests.lengths
        rows = [
            (one.prompt_tokens, one.output_tokens, one.max_tokens, one.remote_tokens)
            for one in requests
        ]
        prompt, output, most, remote = np.array(rows, np.int64).reshape(-1, 4).T
        return cls(prompt, output, most, prompt - remote, any(one.prefix for one in requests))


class Traffic(list[Request]):
    """Requests; ``left_out`` is the number of rows of their trace without prompt or output, and
    ``said`` what else is to be said of it."""

    left_out = 0
    said: tuple[str, ...] = ()

    @cached_property
    def lengths(self) -> Lengths:
        """See :class:`Lengths`."""
        return Lengths.of([*self])

    @property
    def notes(self) -> list[str]:
        """What is left out of the trace or taken as known, in words."""
        what = "requests of the trace without prompt or output tokens (skip_empty)"
        left_out = [f"{what}: {self.left_out:,} left out"] if self.left_out else []
        return [f"workload: {note}" for note in (*left_out, *self.said)]


def build_requests(scenario: Scenario, max_length: int, source: Source) -> Traffic:
    """The requests, in order of arrival; sessions one after the other. None is longer than
    ``max_length`` unless ``too_long`` is ``reject``. Raises UserError, naming the key at fault."""
    workload, seed, session = scenario.workload, scenario.seed, None
    trace = trace_of(scenario, source)
    if workload.every > 1 and workload.requests is not None:  # only every n-th request is kept
        scenario = scenario.having("workload", requests=workload.requests * workload.every)
        workload = scenario.workload
    prompt, output = _lengths(workload, seed, trace, source)
    prefix, shift = None if trace is None else trace.prefix, workload.shift
    if (shift.prompt, shift.output) != (1, 1):
        factors = (shift.prompt, shift.output)
        prompt, output = longer_requests(prompt, output, factors, max_length)
        if trace is not None and prefix is not None:
            ends = prompt if trace.session is None else prompt + output - 1
            prefix = longer_prefixes(prefix, shift.prompt, ends)
    if workload.sessions is not None or workload.system_prompts:
        prompt, prefix, session = _sharing(workload, seed, prompt, output)
    count = len(prompt) if session is None else int(session[-1]) + 1
    arrival_s = burstier(_arrivals(workload, seed, count, trace, source), shift.burstiness)
    if session is not None:
        arrival_s = arrival_s[session]  # the first turn's; later turns wait for their answers
    if not arrival_s.max(initial=0.0) < HORIZON_S:
        raise source.error(*_of_arrivals(workload), _too_late(float(arrival_s.max())))
    too_long = prompt + output > max_length
    if workload.too_long == "error" and too_long.any():
        first = int(too_long.argmax())
        raise source.error(
            "cluster.max_length",
            max_length,
            f"request {first} of the workload has {prompt[first]} prompt and {output[first]} "
            f"output tokens, and {int(too_long.sum())} of {len(prompt)} requests are too long; "
            f"must be at least {int((prompt + output).max())}, or set workload.too_long to reject",
        )
    user = None if trace is None else trace.user
    if workload.every > 1:
        mine = np.argsort(arrival_s, kind="stable")[:: workload.every]
        arrival_s, prompt, output = arrival_s[mine], prompt[mine], output[mine]
        user = None if user is None else user[mine]
        prefix = None if prefix is None else [prefix[place] for place in mine.tolist()]
    exact = workload.declared == "exact"
    made = (arrival_s, prompt, output)
    requests = Traffic(
        make_requests(*made, max_length=max_length, declare_exact=exact, user=user, prefix=prefix)
    )
    if trace is not None:
        requests.left_out, requests.said = trace.left_out, trace.notes
    return requests


def _refusals(workload: Workload) -> Iterator[tuple[str, object, str]]:
    """Contradictions and settings without a meaning: key, value, and what is allowed."""
    lengths, arrivals, sessions = workload.lengths, workload.arrivals, workload.sessions
    groups, pd_ratio = workload.system_prompts, workload.pd_ratio

    def shown(key: str) -> Any:
        return workload.model_dump(include={key})[key]

    if workload.every > 1 and (sessions is not None or isinstance(arrivals, Closed)):
        problem = "must be 1: clients wait for answers that other replicas give, too"
        yield "every", workload.every, problem
    if isinstance(lengths, TraceLengths):
        for key in ("system_prompts", "sessions"):
            if getattr(workload, key):
                problem = "must be left out: the prompts of a trace are complete"
                yield key, shown(key), problem
        if pd_ratio is not None:
            yield "pd_ratio", shown("pd_ratio"), "must be left out: a trace has its own"
    elif workload.requests is None:
        yield "requests", None, "this key is missing"
    if isinstance(lengths, FixedLengths) and (
        (lengths.prompt is None) != (lengths.decode is None)
        or (lengths.total is None) == (lengths.prompt is None)
    ):
        problem = "kind fixed needs prompt and decode, or total and workload.pd_ratio"
        yield "lengths", None, problem
    if not isinstance(lengths, TraceLengths):
        apart = getattr(lengths, "decode", None) is not None
        if apart and pd_ratio is not None:
            problem = "must be left out where lengths.prompt and lengths.decode are given"
            yield "pd_ratio", shown("pd_ratio"), problem
        if not apart and pd_ratio is None:
            problem = "it splits each request's tokens into prompt and output"
            yield "pd_ratio", None, f"this key is missing: {problem}"
    if isinstance(lengths, QuantileLengths):
        for key in ("prompt", "decode"):
            tokens = lengths.tokens(key)
            if {0, 100} - tokens.keys() or list(tokens.values()) != sorted(tokens.values()):
                problem = "must have p0 and p100, and more tokens for a higher percentile"
                yield f"lengths.{key}", getattr(lengths, key), problem
    if isinstance(lengths, ZipfLengths | UniformLengths) and lengths.max < lengths.min:
        yield "lengths.max", lengths.max, f"must be at least min, which is {lengths.min}"
    if isinstance(pd_ratio, PdRange) and pd_ratio.high < pd_ratio.low:
        yield "pd_ratio.high", pd_ratio.high, f"must be at least low, which is {pd_ratio.low:g}"
    if (total := math.fsum(group.share for group in groups.values())) > 1 + 1e-9:
        shares = {name: group.share for name, group in groups.items()}
        yield "system_prompts", shares, f"the shares add up to {total:.12g}: must be at most 1"
    if sessions is not None and isinstance(arrivals, Closed):
        problem = "must be left out: turns already wait for the answers of their session"
        yield "sessions", sessions.model_dump(), problem
    if sessions is not None and sessions.max_turns < sessions.min_turns:
        problem = f"must be at least min_turns, which is {sessions.min_turns}"
        yield "sessions.max_turns", sessions.max_turns, problem
    if isinstance(arrivals, Poisson | Gamma) and arrivals.rate * HORIZON_S <= 1:
        yield "arrivals.rate", arrivals.rate, _too_late(1 / arrivals.rate)
    if isinstance(arrivals, TraceArrivals) and not isinstance(lengths, TraceLengths):
        yield "arrivals.kind", "trace", "lengths must be a trace"
    if isinstance(arrivals, Varying):
        at_s, rate = _rates(arrivals)
        if (np.diff(at_s) < 0).any():
            yield "arrivals.rates", shown("arrivals")["rates"], "at_s must not fall"
        if not (np.trapezoid(rate, at_s) > 0 if arrivals.repeat else rate[-1] > 0):
            problem = "be 0 all the time" if arrivals.repeat else "end with rate 0"
            yield "arrivals.rates", shown("arrivals")["rates"], f"must not {problem}"


def _rates(arrivals: Varying) -> tuple[Floats, Floats]:
    return np.array([r.at_s for r in arrivals.rates]), np.array([r.rate for r in arrivals.rates])


def _too_late(last_s: float) -> str:
    return (
        f"the last request arrives after {last_s:.3g} s, but times must be less than "
        f"{HORIZON_S:.0f} s (24 days)"
    )


def _of_arrivals(workload: Workload) -> tuple[str, object]:
    """The key that sets how late requests arrive, and its value."""
    arrivals = workload.arrivals
    if isinstance(arrivals, Varying):
        return "workload.arrivals.rates", [each.model_dump() for each in arrivals.rates]
    if isinstance(arrivals, TraceArrivals):
        return "workload.lengths.path", getattr(workload.lengths, "path", None)
    return "workload.arrivals.rate", getattr(arrivals, "rate", None)


def trace_of(scenario: Scenario, source: Source) -> Trace | None:
    """The trace, read as ``lengths`` says; None if lengths are drawn. Raises UserError for a file
    that is no trace, and for contradictory keys of the workload."""
    workload, lengths = scenario.workload, scenario.workload.lengths
    for key, value, problem in _refusals(workload):
        raise source.error(f"workload.{key}", value, problem)
    if not isinstance(lengths, TraceLengths):
        return None
    path = trace_path(lengths, source)
    columns = lengths.columns.model_dump(exclude_none=True)
    reading = Reading(columns, lengths.time_unit, lengths.skip_empty, lengths.block_tokens)
    some, block, every = lengths.sample < 1, lengths.resample, workload.every
    asked = None if workload.requests is None else workload.requests * every
    rest = block or some or lengths.skip_empty  # then more rows are needed than requests
    try:
        trace = read_trace(path, None if rest else asked, reading)
    except WorkloadError as error:
        raise source.error("workload.lengths.path", None, str(error)) from None
    if some:
        trace = trace.sampled(lengths.sample, stream(scenario.seed, "sample"))
    if block:
        trace = trace.resampled(asked or len(trace), block, stream(scenario.seed, "blocks"))
    elif rest:
        trace = trace.pick(np.arange(min(asked or len(trace), len(trace))))
    if lengths.clip != Clip():
        trace = trace.clipped(lengths.clip.prompt, lengths.clip.output)
    if asked is not None and asked > len(trace):
        there = f"{lengths.path} has {len(trace)} request{'s' if len(trace) > 1 else ''}"
        there += f" in a sample of {lengths.sample:g}" if some else ""
        there += f", of which one in {every} is kept" if every > 1 else ""
        problem = (
            f"{there}: must be at most {len(trace) // every}, or left out for all; for a longer "
            "run set workload.lengths.resample=100, which draws blocks of 100 again and again"
        )
        raise source.error("workload.requests", workload.requests, problem)
    return trace


def trace_path(lengths: TraceLengths, source: Source) -> Path:
    """The path of the trace. Raises UserError if its ``~user`` has no home folder."""
    try:
        return user_path(lengths.path)
    except SpecError as error:
        raise source.error("workload.lengths.path", None, str(error)) from None


def _turns(sessions: Sessions, count: int, seed: int) -> Ints:
    return draw_sessions(count, sessions.min_turns, sessions.max_turns, stream(seed, "turns"))


def _sharing(
    workload: Workload, seed: int, prompt: Ints, output: Ints
) -> tuple[Ints, list[Prefix], Ints | None]:
    """Whole prompts, their shared prefixes, and the session of each request: a turn begins with the
    earlier turns of its session, and system prompts come first."""
    groups, session, group = list(workload.system_prompts.values()), None, None
    count, tokens = len(prompt), [each.tokens for each in groups]
    if workload.sessions is not None:
        session = _turns(workload.sessions, count, seed)
        prompt = with_turns_before(session, prompt, output)
        count = int(session[-1]) + 1
    if groups:
        group = draw_groups(count, [each.share for each in groups], stream(seed, "system prompts"))
        group = group if session is None else group[session]
        prompt = prompt + np.array([*tokens, 0])[group]
    return prompt, shared_prefixes(tokens, group, session, prompt + output), session


def _lengths(
    workload: Workload, seed: int, trace: Trace | None, source: Source
) -> tuple[Ints, Ints]:
    if trace is not None:
        return trace.prompt, trace.output
    count, given, rng = workload.requests or 0, workload.lengths, stream(seed, "lengths")
    match given:
        case RandomLengths():
            prompt = uniform_lengths(count, *given.bounds(given.prompt), rng)
            return prompt, uniform_lengths(count, *given.bounds(given.decode), rng)
        case QuantileLengths():
            prompt = quantile_lengths(count, given.tokens("prompt"), rng)
            return prompt, quantile_lengths(count, given.tokens("decode"), rng)
        case FixedLengths(prompt=int(), decode=int()):
            prompt = np.full(count, given.prompt, np.int64)
            return prompt, np.full(count, given.decode, np.int64)
        case FixedLengths():
            total = np.full(count, given.total, np.int64)
        case UniformLengths():
            total = uniform_lengths(count, given.min, given.max, rng)
        case ZipfLengths():
            total = zipf_lengths(count, given.theta, given.min, given.max, given.step, rng)
    ratio: Any = workload.pd_ratio
    if isinstance(ratio, PdRange):
        ratio = log_uniform(count, ratio.low, ratio.high, stream(seed, "pd_ratio"))
    try:
        return split_lengths(total, ratio)
    except WorkloadError as error:
        shown = workload.model_dump(include={"pd_ratio"})["pd_ratio"]
        raise source.error("workload.pd_ratio", shown, str(error)) from None


def no_arrivals(trace: Trace | None, source: Source) -> UserError:
    """Why requests cannot arrive as in their trace."""
    if trace is None or not trace.unit_of:
        return source.error("workload.arrivals.kind", "trace", "the trace records no arrivals")
    problem = f"the unit of the column {trace.unit_of} is not known: must be s, ms, us or ns"
    return source.error("workload.lengths.time_unit", None, problem)


def _arrivals(
    workload: Workload, seed: int, count: int, trace: Trace | None, source: Source
) -> Floats:
    rng = stream(seed, "arrivals")
    match given := workload.arrivals:
        case AtOnce() | Closed():
            return at_once(count)
        case Poisson():
            return poisson_arrivals(count, given.rate, rng)
        case Gamma():
            return gamma_arrivals(count, given.rate, given.cv, rng)
        case Varying():
            at_s, rate = _rates(given)
            return varying_arrivals(count, at_s, given.scale * rate, given.repeat, rng)
        case TraceArrivals():
            if trace is None or trace.arrival_s is None:
                raise no_arrivals(trace, source)
            return trace.arrival_s if given.scale == 1 else trace.arrival_s / given.scale
