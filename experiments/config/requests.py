"""The requests that a scenario's ``workload`` section describes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.key_paths import Source
from sarathi_sim.experiments.config.scenario import Scenario
from sarathi_sim.experiments.config.workload import (
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
from sarathi_sim.policies.request import Prefix, Request
from sarathi_sim.profiler.storage.paths import user_path
from sarathi_sim.profiler.storage.strict import SpecError
from sarathi_sim.simulator.load.prefixes import (
    draw_groups,
    draw_sessions,
    shared_prefixes,
    with_turns_before,
)
from sarathi_sim.simulator.load.shift import burstier, longer_prefixes, longer_requests
from sarathi_sim.simulator.load.trace import Reading, Trace, read_trace
from sarathi_sim.simulator.load.workload import (
    WorkloadError,
    at_once,
    gamma_arrivals,
    log_uniform,
    make_requests,
    poisson_arrivals,
    quantile_lengths,
    split_lengths,
    stream,
    uniform_lengths,
    varying_arrivals,
    zipf_lengths,
)
from sarathi_sim.simulator.loop.closed_loop import Clients, ClosedLoop, Conversations
from sarathi_sim.simulator.loop.quantum import HORIZON_S, quantize
from sarathi_sim.simulator.loop.records import Floats, Ints


def build_clients(scenario: Scenario, requests: Sequence[Request]) -> Clients | None:
    """Who sends the requests of sessions and closed loops; None where they arrive by themselves."""
    arrivals, sessions = scenario.workload.arrivals, scenario.workload.sessions
    think, frontend_s = stream(scenario.seed, "think times"), scenario.engine.frontend_s or 0.0
    if sessions is not None:
        arrival_s = quantize(np.array([request.arrival_s for request in requests]))
        think_s = quantize(think.exponential(sessions.think_s, len(requests)) + frontend_s)
        return Conversations(_turns(sessions, len(requests), scenario.seed), arrival_s, think_s)
    if not isinstance(arrivals, Closed):
        return None
    think_s = quantize(think.exponential(arrivals.think_s, len(requests)) + frontend_s)
    return ClosedLoop(arrivals.clients, think_s)


def _turns(sessions: Sessions, count: int, seed: int) -> Ints:
    """The session of each request."""
    return draw_sessions(count, sessions.min_turns, sessions.max_turns, stream(seed, "turns"))


class Traffic(list[Request]):
    """Requests; ``left_out`` is the number of rows of their trace without prompt or output."""

    left_out = 0

    @property
    def note(self) -> str:
        """What is left out, in words; empty for nothing."""
        what = "workload: requests of the trace without prompt or output tokens (skip_empty)"
        return f"{what}: {self.left_out:,} left out" if self.left_out else ""


def build_requests(scenario: Scenario, max_length: int, source: Source) -> Traffic:
    """The requests, in order of arrival; those of sessions one session behind the other.

    None is longer than ``max_length`` unless ``too_long`` is ``reject``. Raises ConfigError, naming
    the key at fault.
    """
    scenario = _of_all_replicas(scenario, source)
    workload = scenario.workload
    trace = trace_of(scenario, source)
    prompt, output = _lengths(scenario, trace, source)
    prefix, shift = None if trace is None else trace.prefix, workload.shift
    if (shift.prompt, shift.output) != (1, 1):
        factors = (shift.prompt, shift.output)
        prompt, output = longer_requests(prompt, output, factors, max_length)
        if trace is not None and prefix is not None:
            ends = prompt if trace.session is None else prompt + output - 1
            prefix = longer_prefixes(prefix, shift.prompt, ends)
    if workload.sessions is None and not workload.system_prompts:
        arrival_s = _arrivals(workload, scenario.seed, len(prompt), trace, source)
    else:
        arrival_s, prompt, output, prefix = _sharing(scenario, prompt, output, trace, source)
    if not arrival_s.max(initial=0.0) < HORIZON_S:
        raise _beyond_horizon(workload, float(arrival_s.max()), source)
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
    requests = Traffic(
        make_requests(
            arrival_s,
            prompt,
            output,
            max_length=max_length,
            declare_exact=workload.declared == "exact",
            user=user,
            prefix=prefix,
        )
    )
    requests.left_out = 0 if trace is None else trace.left_out
    return requests


def _of_all_replicas(scenario: Scenario, source: Source) -> Scenario:
    """The scenario with the requests of which every n-th is kept. Raises ConfigError where clients
    wait for answers, and so for what other replicas do."""
    workload = scenario.workload
    if workload.every == 1:
        return scenario
    if workload.sessions is not None or isinstance(workload.arrivals, Closed):
        problem = "must be 1: clients wait for answers that other replicas give, too"
        raise source.error("workload.every", workload.every, problem)
    if workload.requests is None:
        return scenario
    update = {"requests": workload.requests * workload.every}
    return scenario.model_copy(update={"workload": workload.model_copy(update=update)})


def trace_of(scenario: Scenario, source: Source) -> Trace | None:
    """What the trace holds, as ``lengths`` asks for it; None where lengths are drawn. Raises
    ConfigError for a file that is no trace."""
    workload = scenario.workload
    lengths = workload.lengths
    if not isinstance(lengths, TraceLengths):
        return None
    for key in ("system_prompts", "sessions"):
        value = getattr(workload, key)
        if value:
            problem = "must be left out: a trace's prompts are whole as they stand"
            shown = workload.model_dump()[key]
            raise source.error(f"workload.{key}", shown, problem)
    path = trace_path(lengths, source)
    columns = lengths.columns.model_dump(exclude_none=True)
    reading = Reading(columns, lengths.time_unit, lengths.skip_empty)
    some, block = lengths.sample < 1, lengths.resample
    try:
        trace = read_trace(path, None if some or block else workload.requests, reading)
    except WorkloadError as error:
        raise ConfigError(f"{source.name(('workload', 'lengths', 'path'))}: {error}") from None
    left_out = trace.left_out
    if some:
        trace = trace.sampled(lengths.sample, stream(scenario.seed, "sample"))
        if not block:
            trace = trace.pick(np.arange(min(workload.requests or len(trace), len(trace))))
    if block:
        count = workload.requests or len(trace)
        trace = trace.resampled(count, block, stream(scenario.seed, "blocks"))
    if lengths.clip != Clip():
        trace = trace.clipped(lengths.clip.prompt, lengths.clip.output)
    if workload.requests is not None and workload.requests > len(trace):
        problem = f"must be at most {len(trace)}, the requests of {lengths.path}"
        raise source.error("workload.requests", workload.requests, problem)
    return replace(trace, left_out=left_out)


def _sharing(
    scenario: Scenario, prompt: Ints, output: Ints, trace: Trace | None, source: Source
) -> tuple[Floats, Ints, Ints, list[Prefix]]:
    """Arrivals, prompts, outputs and prefixes where prompts share their beginning."""
    workload, seed, count = scenario.workload, scenario.seed, len(prompt)
    groups, sessions = list(workload.system_prompts.values()), workload.sessions
    total = math.fsum(group.share for group in groups)
    if total > 1 + 1e-9:
        problem = f"the shares add up to {total:.12g}: must be at most 1"
        value = {name: group.share for name, group in workload.system_prompts.items()}
        raise source.error("workload.system_prompts", value, problem)
    session = None
    if sessions is not None:
        if isinstance(workload.arrivals, Closed):
            problem = "must be left out: turns wait for answers already, each session for its own"
            raise source.error("workload.sessions", sessions.model_dump(), problem)
        if sessions.max_turns < sessions.min_turns:
            problem = f"must be at least min_turns, which is {sessions.min_turns}"
            raise source.error("workload.sessions.max_turns", sessions.max_turns, problem)
        session = _turns(sessions, count, seed)
        prompt = with_turns_before(session, prompt, output)
        count = int(session[-1]) + 1
    arrival_s = _arrivals(workload, seed, count, trace, source)
    group = None
    if groups:
        group = draw_groups(count, [each.share for each in groups], stream(seed, "system prompts"))
        group = group if session is None else group[session]
        tokens = [each.tokens for each in groups]
        prompt = prompt + np.array([*tokens, 0])[group]
    if session is not None:
        arrival_s = arrival_s[session]  # of the session's first turn; the others' are not known yet
    return (
        arrival_s,
        prompt,
        output,
        shared_prefixes([each.tokens for each in groups], group, session, prompt + output),
    )


def trace_path(lengths: TraceLengths, source: Source) -> Path:
    """The path of the trace. Raises ConfigError if its ``~user`` has no home folder."""
    try:
        return user_path(lengths.path)
    except SpecError as error:
        raise ConfigError(f"{source.name(('workload', 'lengths', 'path'))}: {error}") from None


def _beyond_horizon(workload: Workload, last_s: float, source: Source) -> ConfigError:
    """What to raise where arrivals are too late."""
    arrivals = workload.arrivals
    varies = isinstance(arrivals, Varying)
    key = "lengths.path" if isinstance(arrivals, TraceArrivals) else "arrivals.rate" + "s" * varies
    value = workload.model_dump()["arrivals"]["rates"] if varies else attrgetter(key)(workload)
    problem = (
        f"the last request arrives after {last_s:.3g} s, but times must be less than "
        f"{HORIZON_S:.0f} s (24 days)"
    )
    return source.error(f"workload.{key}", value, problem)


def _lengths(scenario: Scenario, trace: Trace | None, source: Source) -> tuple[Ints, Ints]:
    workload = scenario.workload
    lengths, shown = workload.lengths, workload.model_dump()["pd_ratio"]
    if trace is not None:
        if workload.pd_ratio is not None:
            raise source.error("workload.pd_ratio", shown, "must be left out: a trace has its own")
        return trace.prompt, trace.output
    count = workload.requests
    if count is None:
        raise ConfigError(f"{source.name(('workload', 'requests'))}: this key is missing")
    if isinstance(lengths, RandomLengths | QuantileLengths):
        if workload.pd_ratio is not None:
            problem = "must be left out where lengths.prompt and lengths.decode are given"
            raise source.error("workload.pd_ratio", shown, problem)
        rng = stream(scenario.seed, "lengths")
        if isinstance(lengths, QuantileLengths):
            _check_quantiles(lengths, source)
            return (
                quantile_lengths(count, lengths.tokens("prompt"), rng),
                quantile_lengths(count, lengths.tokens("decode"), rng),
            )
        prompt, output = (
            uniform_lengths(count, *lengths.bounds(stated), rng)
            for stated in (lengths.prompt, lengths.decode)
        )
        return prompt, output
    if isinstance(lengths, FixedLengths):
        if (lengths.prompt is None) != (lengths.decode is None) or (
            (lengths.total is None) == (lengths.prompt is None)
        ):
            raise ConfigError(
                f"{source.name(('workload', 'lengths'))}: kind fixed needs prompt and decode, "
                "or total and workload.pd_ratio"
            )
        if lengths.prompt is not None and lengths.decode is not None:
            if workload.pd_ratio is not None:
                problem = "must be left out where lengths.prompt and lengths.decode are given"
                raise source.error("workload.pd_ratio", shown, problem)
            return (
                np.full(count, lengths.prompt, np.int64),
                np.full(count, lengths.decode, np.int64),
            )
    if workload.pd_ratio is None:
        raise ConfigError(
            f"{source.name(('workload', 'pd_ratio'))}: this key is missing: it splits each "
            "request's tokens into prompt and output"
        )
    total = _totals(lengths, count, scenario.seed, source)
    try:
        return split_lengths(total, _pd_ratios(workload.pd_ratio, count, scenario.seed, source))
    except WorkloadError as error:
        raise source.error("workload.pd_ratio", shown, str(error)) from None


def _pd_ratios(pd_ratio: float | PdRange, count: int, seed: int, source: Source) -> float | Floats:
    """P:D of all requests, or of each."""
    if not isinstance(pd_ratio, PdRange):
        return pd_ratio
    if pd_ratio.high < pd_ratio.low:
        problem = f"must be at least low, which is {pd_ratio.low:g}"
        raise source.error("workload.pd_ratio.high", pd_ratio.high, problem)
    return log_uniform(count, pd_ratio.low, pd_ratio.high, stream(seed, "pd_ratio"))


def _check_quantiles(lengths: QuantileLengths, source: Source) -> None:
    """Refuse percentiles that do not rise from 0 to 100. Raises ConfigError."""
    for key in ("prompt", "decode"):
        tokens = lengths.tokens(key)
        if {0, 100} - tokens.keys() or list(tokens.values()) != sorted(tokens.values()):
            problem = "must have p0 and p100, and more tokens for a higher percentile"
            raise source.error(f"workload.lengths.{key}", getattr(lengths, key), problem)


def _totals(
    lengths: ZipfLengths | UniformLengths | FixedLengths | TraceLengths,
    count: int,
    seed: int,
    source: Source,
) -> Ints:
    if isinstance(lengths, ZipfLengths | UniformLengths):
        if lengths.max < lengths.min:
            problem = f"must be at least min, which is {lengths.min}"
            raise source.error("workload.lengths.max", lengths.max, problem)
        rng = stream(seed, "lengths")
        if isinstance(lengths, UniformLengths):
            return uniform_lengths(count, lengths.min, lengths.max, rng)
        return zipf_lengths(count, lengths.theta, lengths.min, lengths.max, lengths.step, rng)
    assert isinstance(lengths, FixedLengths)
    assert lengths.total is not None
    return np.full(count, lengths.total, np.int64)


def _arrivals(
    workload: Workload, seed: int, count: int, trace: Trace | None, source: Source
) -> Floats:
    drawn = _arrivals_as_given(workload, seed, count, trace, source)
    return burstier(drawn, workload.shift.burstiness)


def _arrivals_as_given(
    workload: Workload, seed: int, count: int, trace: Trace | None, source: Source
) -> Floats:
    arrivals = workload.arrivals
    if isinstance(arrivals, AtOnce | Closed):
        return at_once(count)
    if isinstance(arrivals, Poisson | Gamma) and arrivals.rate * HORIZON_S <= 1:
        raise _beyond_horizon(workload, 1 / arrivals.rate, source)
    if isinstance(arrivals, Poisson):
        return poisson_arrivals(count, arrivals.rate, stream(seed, "arrivals"))
    if isinstance(arrivals, Varying):
        return _varying(arrivals, count, stream(seed, "arrivals"), source)
    if isinstance(arrivals, Gamma):
        return gamma_arrivals(count, arrivals.rate, arrivals.cv, stream(seed, "arrivals"))
    if trace is None or trace.arrival_s is None:
        reason = "lengths must be a trace" if trace is None else "the trace records no arrivals"
        raise source.error("workload.arrivals.kind", "trace", reason)
    return trace.arrival_s if arrivals.scale == 1 else trace.arrival_s / arrivals.scale


def _varying(arrivals: Varying, count: int, rng: np.random.Generator, source: Source) -> Floats:
    """Arrivals at a rate that varies. Raises ConfigError for rates that do not make sense."""
    at_s, rate = (np.array([getattr(r, key) for r in arrivals.rates]) for key in ("at_s", "rate"))
    shown = [each.model_dump() for each in arrivals.rates]
    if (np.diff(at_s) < 0).any():
        raise source.error("workload.arrivals.rates", shown, "at_s must not fall")
    endless = np.trapezoid(rate, at_s) > 0 if arrivals.repeat else rate[-1] > 0
    if not endless:
        problem = "must not be 0 all the time" if arrivals.repeat else "must not end with rate 0"
        raise source.error("workload.arrivals.rates", shown, problem)
    return varying_arrivals(count, at_s, arrivals.scale * rate, arrivals.repeat, rng)
