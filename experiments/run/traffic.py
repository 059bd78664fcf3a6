"""The option ``--workload``: lengths in a word, a trace, or a configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sarathi_sim.profiler.storage.files import user_path
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.load.requests import (
    WorkloadError,
    at_once,
    describe_workload,
    lengths_line,
    make_requests,
    peak_rate,
)
from sarathi_sim.simulator.load.trace import NAMES, form_of, read_trace
from sarathi_sim.simulator.loop.records import Ints
from ..config.base import Assignments, Config, Source
from ..config.loading import Draft, check_scenario, load_experiment, read_draft
from ..config.requests import Traffic, build_requests, no_arrivals, trace_of
from ..config.workload import RandomLengths

T = TypeVar("T")
FORMS = (
    "expected PROMPT:OUTPUT tokens, equal for all requests (1024:256) or spread evenly around it "
    "(1024:256~0.5), total tokens @ their P:D ratio (1K@14, 1K@5..50, 1K@? for 1 to 200), a trace "
    "(.csv, .json, .jsonl), or a configuration"
)
TRACES = (".csv", ".json", ".jsonl")
POISSON: dict[str, Any] = {"kind": "poisson", "rate": 1}
REQUESTS = 10_000
"""Requests that are drawn for lengths in a word."""
LONGEST = 2**24
"""Most tokens of a request that lengths in a word state."""
FURTHEST = 8192
"""Most tokens of a request for which advice is given: the range of the machine's tables."""
_LENGTHS = ("lengths", "pd_ratio", "system_prompts", "sessions")
# A scenario needs these keys, its requests do not.
_REST = {"model": "any", "device": "any", "policy": {"name": "orca"}}
_NUMBER = r"\d+(?:\.\d+)?"
_PAIR = re.compile(rf"({_NUMBER}[kK]?):({_NUMBER}[kK]?)(?:~({_NUMBER}))?")
_TOTAL = re.compile(rf"({_NUMBER}[kK]?)@(?:(\?)|({_NUMBER})(?:\.\.({_NUMBER}))?)")
_RATIO_OF_TOTAL = re.compile(rf"({_NUMBER}[kK]?):(\?|{_NUMBER}\.\.{_NUMBER}|\d+\.\d+)")


def in_a_word(text: str) -> tuple[dict[str, Any], int] | None:
    """The lengths of requests that a word such as ``1024:256`` states, as keys of the section
    ``workload``, and the longest request they allow; None where the text is no such word. Raises
    UserError for a wrong word, with all allowed forms."""
    word = text.replace(" ", "")
    try:
        if old := _RATIO_OF_TOTAL.fullmatch(word):
            raise ValueError(f"total tokens and their P:D ratio are written {old[1]}@{old[2]}")
        if pair := _PAIR.fullmatch(word):
            return _pair(_tokens(pair[1]), _tokens(pair[2]), pair[3])
        if total := _TOTAL.fullmatch(word):
            low, high = ("1", "200") if total[2] else (total[3], total[4] or total[3])
            return _total(_tokens(total[1]), float(low), float(high))
        if re.match(r"[\d.]+[kK]?[:@~]", word):
            raise ValueError("these are not lengths")
    except ValueError as error:
        raise UserError(f"--workload {text}: {error}; {FORMS}") from None
    return None


def _tokens(text: str) -> int:
    tokens = float(text[:-1]) * 1024 if text[-1] in "kK" else float(text)
    if not (tokens.is_integer() and 1 <= tokens <= LONGEST):
        raise ValueError(f"{text} must be whole tokens, from 1 to {LONGEST:,}")
    return int(tokens)


def _pair(prompt: int, decode: int, spread: str | None) -> tuple[dict[str, Any], int]:
    given: dict[str, Any] = {"prompt": prompt, "decode": decode}
    if spread is None:
        return {"lengths": {"kind": "fixed", **given}}, prompt + decode
    if not float(spread) < 1:
        raise ValueError(f"the spread {spread} must be below 1")
    given = {"kind": "random", **given, "tool": "vllm", "range_ratio": float(spread)}
    lengths = RandomLengths(**given)
    return {"lengths": given}, sum(lengths.bounds(mean)[1] for mean in (prompt, decode))


def _total(total: int, low: float, high: float) -> tuple[dict[str, Any], int]:
    if total < 2 or not 1e-6 <= low <= high <= 1e6:
        raise ValueError("the total must be at least 2, and P:D rise, from 1e-6 to 1e6")
    ratio = low if low == high else {"low": low, "high": high}
    return {"lengths": {"kind": "fixed", "total": total}, "pd_ratio": ratio}, total


def parse_workload(text: str, max_length: int | None) -> tuple[dict[str, Any], int]:
    """The section ``workload``, and the length of the longest sequence: ``max_length``, or else the
    longest request rounded up to 512 tokens (for a configuration: its ``cluster.max_length``).
    Raises UserError for a text of another form, and for a file that cannot be read."""
    usual = {"arrivals": POISSON, "declared": "exact", "too_long": "reject"}
    if stated := in_a_word(text):
        return {**usual, "requests": REQUESTS, **stated[0]}, max_length or _rounded(stated[1])
    if is_trace(text):
        path = user_path(text)
        lengths = {"kind": "trace", "path": str(path.absolute())}
        if not max_length:
            try:
                trace = read_trace(path)
            except WorkloadError as error:
                raise UserError(f"--workload {error}") from None
            max_length = _rounded(int((trace.prompt + trace.output).max()))
        return {**usual, "lengths": lengths}, max_length
    draft = or_forms(read_draft, text)
    workload, cluster = draft.raw.get("workload"), draft.raw.get("cluster")
    if not isinstance(workload, dict):
        raise UserError(f"--workload {text}: this configuration has no section workload")
    given = cluster.get("max_length") if isinstance(cluster, dict) else None
    if max_length is None and not isinstance(given, int):
        raise UserError(
            f"--workload {text}: it states no cluster.max_length: give --set max_length"
        )
    kept = {key: value for key, value in workload.items() if key != "declared"}
    return {**kept, "declared": "exact"}, max_length or int(str(given))


def is_trace(text: str) -> bool:
    """Whether ``text`` names a trace, by its suffix."""
    return form_of(Path(text)) in TRACES


def rates_of(text: str) -> tuple[float, float] | None:
    """Requests a second of the trace that ``text`` names, on average and in its busiest minute;
    None if it names none, or one whose arrivals are not known."""
    trace = read_trace(user_path(text)) if is_trace(text) else None
    if trace is None or trace.arrival_s is None or not trace.arrival_s[-1]:
        return None
    return (len(trace) - 1) / float(trace.arrival_s[-1]), peak_rate(trace.arrival_s)


def _rounded(tokens: int) -> int:
    return -(-tokens // 512) * 512


def or_forms(read: Callable[[str], T], text: str) -> T:
    """``read(text)``. Raises its UserError; without such a file, with all forms of the option."""
    try:
        return read(text)
    except UserError as error:
        if user_path(text).is_file():
            raise
        raise UserError(f"--workload {error}; {FORMS}") from None


def requests_of(text: str, *, arrivals: Mapping[str, Any] | None = None) -> Traffic:
    """The requests that the option states. Raises UserError as :func:`parse_workload` does."""
    section, _ = parse_workload(text, LONGEST)
    section |= {} if arrivals is None else {"arrivals": arrivals}
    source = Source(f"--workload {text}", "", {}, ())
    return build_requests(check_scenario({**_REST, "workload": section}, source), LONGEST, source)


def with_workload(draft: Draft, text: str | None) -> Draft:
    """A configuration with these lengths in place of its own, in all scenarios (None: unchanged).
    Number and arrivals of the requests stay; a trace has its own number. Raises UserError for a
    text of another form, and if ``--set`` gives lengths, too."""
    if text is None:
        return draft
    for path in draft.assigned:
        if any(section == "workload" and key in _LENGTHS for section, key in pairwise(path)):
            raise UserError(f"--set {'.'.join(path)}: has no effect: --workload gives lengths")
    given, _ = parse_workload(text, LONGEST)
    lengths = {key: given[key] for key in _LENGTHS if key in given}
    number = {} if is_trace(text) else {"requests": REQUESTS}
    left_out = (*_LENGTHS, "requests") if is_trace(text) else _LENGTHS

    def changed(tree: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        own = tree.get("workload")
        if not isinstance(own, dict) and not given:
            return dict(tree)
        kept = {k: v for k, v in (own or {}).items() if k not in left_out}
        return {**tree, "workload": {**given, **kept}}

    overrides = {name: changed(tree, {}) for name, tree in draft.overrides.items()}
    return replace(
        draft,
        raw=changed(draft.raw, {**number, **lengths}),
        overrides=overrides,
    )


@dataclass(frozen=True, eq=False)
class Demand:
    """Prompt and output tokens of requests, in the order of their P:D."""

    prompt: Ints
    output: Ints

    @cached_property
    def length(self) -> int:
        """Tokens of the longest request."""
        return int((self.prompt + self.output).max())

    def requests(self, count: int) -> tuple[Ints, Ints]:
        """Prompt and output tokens of a sample with every P:D in proportion, shuffled alike."""
        at = ((np.arange(count) + 0.5) / count * len(self.prompt)).astype(np.int64)
        at = np.random.default_rng(0).permutation(at)
        return self.prompt[at], self.output[at]

    @property
    def ratio(self) -> str:
        """P:D, or its range."""
        ends = [f"{float(f'{self.prompt[at] / self.output[at]:.2g}'):g}" for at in (0, -1)]
        return " to ".join(dict.fromkeys(ends))

    def line(self) -> str:
        """The lengths, in words."""
        least = int((self.prompt + self.output).min())
        most = "" if least == self.length else f"{least:,} to "
        said = lengths_line(self.prompt, self.output)
        return f"requests of {most}{self.length:,} tokens in total, P:D {self.ratio}: {said}"


def demand_of(text: str) -> Demand:
    """The lengths of a ``--workload``. Raises UserError for a wrong one."""
    word = text.replace(" ", "")
    if old := re.fullmatch(r"(\d+(?:\.\d+)?[kK]):(\d+)", word):
        plain = f"{1024 * float(old[1][:-1]):g}:{old[2]}"
        raise UserError(
            f"--workload {text}: total tokens and their P:D ratio are written {old[1]}@{old[2]}; "
            f"a prompt of {old[1]} with {old[2]} output tokens {plain}; {FORMS}"
        )
    lengths = np.array([(one.prompt_tokens, one.output_tokens) for one in requests_of(text)])
    order = np.argsort(lengths[:, 0] / lengths[:, 1], kind="stable")
    demand = Demand(*lengths[order].T)
    if demand.length > FURTHEST:
        raise UserError(
            f"--workload {text}: its longest request has {demand.length:,} tokens; must be at most "
            f"{FURTHEST:,}"
        )
    return demand


Found = dict[str, tuple[Traffic, int | None]]
"""By name, the requests and the clients of a closed loop."""


def describe(found: Found) -> dict[str, dict[str, Any]]:
    """The numbers of :func:`describe_workload`, ``left_out`` (the rows of a trace without tokens)
    and the ``notes`` on its file, by name."""
    return {
        name: describe_workload(requests, clients)
        | {"left_out": requests.left_out, "notes": requests.said}
        for name, (requests, clients) in found.items()
    }


def workloads_of(what: Config, changes: Assignments, columns: Mapping[str, str]) -> Found:
    """The requests of a word, of a trace, or of each scenario that has its own."""
    text = None if isinstance(what, Mapping) else str(what)
    if text is not None and in_a_word(text):
        if changes or columns:
            raise UserError(f"--set, --column: must be left out: {text} has neither")
        return {text: (requests_of(text, arrivals={"kind": "at_once"}), None)}
    if text is not None and is_trace(text):
        return {Path(text).stem: (_of_trace(text, changes, columns), None)}
    if columns:
        raise UserError("--column: must be left out: a configuration has lengths.columns")
    if text is None:
        experiment = load_experiment(what, changes)
    else:
        experiment = or_forms(lambda text: load_experiment(text, changes), text)
    found: Found = {}
    seen: set[str] = set()
    for name, scenario in experiment.scenarios.items():
        length = scenario.cluster.max_length or LONGEST
        key = f"{scenario.seed} {length} {scenario.workload.model_dump_json()}"
        if key not in seen:
            seen.add(key)
            requests = build_requests(scenario, length, experiment.sources[name])
            found[name] = requests, getattr(scenario.workload.arrivals, "clients", None)
    return found


def _of_trace(path: str, changes: Assignments, columns: Mapping[str, str]) -> Traffic:
    for meaning, name in columns.items():
        if meaning not in NAMES or not name:
            allowed = f"must be {' or '.join(NAMES)}, = and a name"
            raise UserError(f"--column {meaning}={name}: {allowed}")
    lengths = {"kind": "trace", "path": path, "columns": dict(columns)}
    config = {**_REST, "workload": {"lengths": lengths}}
    for key in read_draft(config, changes).assigned:
        if key != ("workload", "requests") and not (key[:2] == ("workload", "lengths") != key):
            allowed = "a trace has workload.lengths and workload.requests"
            raise UserError(f"--set {'.'.join(key)}: {allowed}")
    experiment = load_experiment(config, changes)
    ((name, scenario),) = experiment.scenarios.items()
    try:
        trace = trace_of(scenario, experiment.sources[name])
    except UserError as error:  # which names the file
        said = str(error).removeprefix("configuration: workload.lengths.path: ")
        raise UserError(said) from None
    if trace is None:
        raise UserError("--set workload.lengths.kind: must be trace")
    if trace.unit_of:
        raise no_arrivals(trace, experiment.sources[name])
    arrival_s = at_once(len(trace)) if trace.arrival_s is None else trace.arrival_s
    names: dict[str, Any] = {"user": trace.user, "prefix": trace.prefix}
    columns_ = (arrival_s, trace.prompt, trace.output)
    requests = Traffic(make_requests(*columns_, max_length=1, declare_exact=True, **names))
    requests.left_out, requests.said = trace.left_out, trace.notes
    return requests
