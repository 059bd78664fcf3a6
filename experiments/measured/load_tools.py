"""What load tools measured of a server: files of vLLM, SGLang, AIPerf, GenAI-Perf and guidellm.

A file is known by its keys. Of each run it has the times of every request, or means, as the sources
of vLLM 0.32.0, SGLang 0.5.23, AIPerf 0.3.0 and 0.13.0, GenAI-Perf 0.0.16, and guidellm 0.3.1 to
0.8.1 write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain
from math import inf, isinf, nan
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import pandas as pd
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import from_json

from sarathi_sim.profiler.storage.files import LARGEST_DATA, read_bounded
from sarathi_sim.profiler.storage.strict import UserError, mistakes, short

TOOL_SEED = 0
"""The seed that vLLM's tool takes unless another is given."""
SUFFIXES = (".json", ".jsonl")
"""How the files of load tools usually end."""
TOOLS = {
    "vLLM": "vllm bench serve --save-result --save-detailed",
    "SGLang": "python -m sglang.bench_serving --output-file FILE --output-details",
    "AIPerf": "aiperf profile --streaming --export-level records, which writes "
    "profile_export.jsonl",
    "guidellm": "guidellm run --output kind=json without a sample_size, or before 0.7 guidellm "
    "benchmark with --sample-requests, at least the number of requests",
    "LLMServingSim": "its bench, which writes requests.jsonl",
}
"""Load tools, and the commands by which they keep the times of every request."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Benchmark:
    """One run of a load tool against a server.

    ``rate`` is in requests a second; None if they were sent all at once, or as soon as one of
    ``concurrency`` clients was free (None: no limit), or if the file does not say. ``burstiness``
    is the shape of the gamma distribution of the gaps: 1 is Poisson, infinity a constant rate.

    The means are over ``requests_count`` requests that succeeded, in tokens and seconds (``ttft_s``
    to the first token, ``tpot_s`` from then on by token, NaN where all outputs are of one token;
    guidellm's is over tokens). ``duration_s`` is from the first request to the last token.

    ``requests`` has a row a request in order of arrival: ``arrival_s`` (after the first),
    ``prompt_tokens``, ``output_tokens``, ``ttft_s``, ``tpot_s`` (NaN for one token), ``latency_s``
    (to the last token); None if the file has means only. ``note`` says what of it is not used."""

    tool: str
    name: str = ""
    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    requests_count: int
    mean_prompt: float
    mean_output: float
    ttft_s: float
    tpot_s: float
    output_tokens_per_s: float
    duration_s: float
    failed: int = 0
    requests: pd.DataFrame | None = None
    note: str = ""

    @property
    def command(self) -> str:
        """The command that keeps the times of every request; of a tool without one, AIPerf's."""
        return TOOLS.get(self.tool, TOOLS["AIPerf"])


def read_benchmarks(path: Path) -> list[Benchmark]:
    """The runs in a load tool's file, named after it, and numbered if it has several. Raises
    UserError, naming file, line and key, for a file that is none, is broken, or has no request that
    succeeded; SpecError as :func:`read_bounded` does."""
    documents = _documents(path)
    where, first = next(documents, (str(path), {}))
    for keys, reader in _READERS.items():
        if not first.keys().isdisjoint(keys):
            found = reader(chain([(where, first)], documents))
            several = len(found) > 1
            names = (path.stem + f" {number}" * several for number in range(1, len(found) + 1))
            return [replace(one, name=name) for one, name in zip(found, names, strict=True)]
    made = "; ".join(f"{tool}: {command}" for tool, command in TOOLS.items())
    shown = ", ".join(short(key) for key in list(first)[:4])
    held = f"it has the keys {shown}" if first else "it does not begin with a JSON object"
    problem = "is not the file of a load tool that timed a server's requests"
    raise UserError(f"{path}: {problem}: {held}; these make one: {made}")


_Documents = Iterable[tuple[str, dict[str, Any]]]  # where it is, and its content
_Row = Sequence[float]  # sent (s), prompt, output (tokens), TTFT, from then to the last token (s)


def _documents(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    content = read_bounded(path, LARGEST_DATA).strip()
    if not content.startswith(b"{"):
        return
    by_line = content.startswith(b'{"')  # an object on many lines begins with a line of its own
    for number, line in enumerate(content.splitlines() if by_line else [content], 1):
        where = f"{path}: line {number}" if by_line else str(path)
        try:
            found = from_json(line or b"{}")
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        if not isinstance(found, dict):
            raise UserError(f"{where}: must be an object")
        if found:
            yield where, found


_Count = Annotated[int, Field(ge=1, le=2**24)]
_Tokens = Annotated[int, Field(ge=0, le=2**24)]
_Time = Annotated[float, Field(ge=0, le=1e12)]
_Mean = Annotated[float, Field(gt=0, le=1e12)]
_Milliseconds = Annotated[_Time, AfterValidator(lambda value: value / 1e3)]
_MeanMs = Annotated[_Mean, AfterValidator(lambda value: value / 1e3)]
_TpotMs = Annotated[_Time, AfterValidator(lambda value: value / 1e3 or nan)]  # 0: there is none
_Rounded = Annotated[_Time, AfterValidator(round)]
_or_inf = BeforeValidator(lambda value: inf if value == "inf" else value)
_Infinite = Annotated[float, Field(gt=0, allow_inf_nan=True), _or_inf]


class _Given(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")


_Kind = TypeVar("_Kind", bound=_Given)


def _checked(kind: type[_Kind], content: object, where: str) -> _Kind:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        held = content if isinstance(content, dict) else {}
        line = mistakes(error, kind, held, lambda key: f"{where}: {'.'.join(key)}")[0]
        streamed = "time_to_first_token" in line and line.endswith("missing")
        raise UserError(line + ": answers must be streamed" * streamed) from None


def _at(*keys: str, default: Any = ...) -> Any:
    return Field(default, validation_alias=AliasPath(*keys))


def _either(*keys: str | AliasPath, default: Any = ...) -> Any:
    return Field(default, validation_alias=AliasChoices(*keys))


def _none(where: str, failed: object) -> UserError:
    return UserError(f"{where}: holds no requests that succeeded ({short(failed)} failed)")


def _measured(
    where: str, rows: Iterable[_Row], failed: int, offered: Mapping[str, Any]
) -> Benchmark:
    names = ["arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "rest_s"]
    every = pd.DataFrame(rows, columns=names)
    table = every[every["output_tokens"] > 0]
    failed += len(every) - len(table)
    if table.empty:
        raise _none(where, failed)
    if not (table["ttft_s"] > 0).all():
        raise UserError(f"{where}: a time to first token is 0: answers must be streamed")
    if ((table["rest_s"] <= 0) & (table["output_tokens"] > 1)).any():
        raise UserError(f"{where}: the tokens of an answer came at once: it must be streamed")
    table = table.sort_values("arrival_s", kind="stable", ignore_index=True)
    table["arrival_s"] -= table["arrival_s"].iloc[0]
    rest, output = table.pop("rest_s"), table["output_tokens"]
    table["tpot_s"] = rest / (output - 1).where(output > 1)
    table["latency_s"] = table["ttft_s"] + rest
    duration_s = float((table["arrival_s"] + table["latency_s"]).max())
    return Benchmark(
        **offered,
        requests_count=len(table),
        mean_prompt=float(table["prompt_tokens"].mean()),
        mean_output=float(output.mean()),
        ttft_s=float(table["ttft_s"].mean()),
        tpot_s=float(table["tpot_s"].mean()),
        output_tokens_per_s=int(output.sum()) / duration_s,
        duration_s=duration_s,
        failed=failed,
        requests=table,
    )


_DETAILS = ("input_lens", "ttfts", "ttfts_s")


class _Serve(_Given):
    """vLLM's ``request_rate`` is a number or "inf", SGLang's a number or Infinity."""

    request_rate: _Infinite
    burstiness: _Infinite = 1.0
    request_goodput: Any = None
    max_concurrency: _Count | None = None


class _ServeMeans(_Given):
    requests_count: _Count = _at("completed")
    mean_prompt: _Mean = _at("total_input_tokens")
    mean_output: _Mean = _at("total_output_tokens")
    ttft_s: _MeanMs = _at("mean_ttft_ms")
    tpot_s: _TpotMs = _at("mean_tpot_ms")
    output_tokens_per_s: _Mean = _at("output_throughput")
    duration_s: _Mean = _at("duration")
    failed: _Tokens = 0


class _ServeDetails(_Serve):
    """Lists with an entry a request; today's vLLM has ``start_times``, SGLang has not."""

    input_lens: Annotated[list[_Count], Field(min_length=1)]
    output_lens: list[_Tokens]
    ttfts: list[_Time] = _either("ttfts", "ttfts_s")
    itls: list[list[_Time]] = _either("itls", "itls_s")
    errors: list[str | None] | None = None
    start_times: list[_Time] | None = None

    @property
    def stretched(self) -> bool:
        """Whether it is of ``bench serve``, not ``benchmark_serving`` or SGLang."""
        return {"request_goodput", "burstiness"} <= self.model_fields_set

    def sent(self, rest_s: Sequence[float]) -> list[float]:
        """When each request was sent, in seconds. Where it was not recorded, the gaps are those
        that vLLM's tool draws with its seed (SGLang's are distributed alike), stretched to the mean
        rate by ``bench serve``; a request waits for ``max_concurrency``."""
        if self.start_times is not None:
            return self.start_times
        count, shape = len(rest_s), min(self.burstiness, 1e12)  # almost constant
        scale = 1 / (self.request_rate * shape)
        gaps = np.random.RandomState(TOOL_SEED).gamma(shape, scale, count)
        if self.stretched and scale:
            gaps *= count / self.request_rate / gaps.sum()
        sent, ends = [0.0, *np.cumsum(gaps[1:] if self.stretched else gaps[:-1])], list[float]()
        for n, (ttft, rest) in enumerate(zip(self.ttfts, rest_s, strict=True)):
            if len(ends) == self.max_concurrency:
                sent[n] = max(sent[n], heappop(ends))
            heappush(ends, sent[n] + ttft + rest)
        return sent


def _served(where: str, content: dict[str, Any]) -> Benchmark:
    """A result of vLLM's ``bench serve`` or ``benchmark_serving``, or of SGLang's
    ``bench_serving``, which alone names its dataset."""
    load = _checked(_Serve, content, where)
    offered: dict[str, Any] = {
        "tool": "SGLang" if "dataset_name" in content else "vLLM",
        "rate": None if isinf(load.request_rate) else load.request_rate,
        "burstiness": load.burstiness,
        "concurrency": load.max_concurrency,
    }
    if content.get("completed") == 0:
        raise _none(where, content.get("failed"))
    if content.keys().isdisjoint(_DETAILS):
        means = vars(_checked(_ServeMeans, content, where))
        for key in ("mean_prompt", "mean_output"):
            means[key] /= means["requests_count"]
        return Benchmark(**offered, **means)
    found = _checked(_ServeDetails, content, where)
    count = len(found.input_lens)
    for key in ("output_lens", "ttfts", "itls", "errors", "start_times"):
        entries = getattr(found, key)
        if entries is not None and len(entries) != count:
            raise UserError(f"{where}: {key}: must have {count} entries, as input_lens has")
    rest_s = [sum(gaps) for gaps in found.itls]
    columns = (found.sent(rest_s), found.input_lens, found.output_lens, found.ttfts, rest_s)
    rows = zip(*columns, strict=True)
    kept = [row for row, error in zip(rows, found.errors or [""] * count, strict=True) if not error]
    return _measured(where, kept, count - len(kept), offered)


class _Fate(_Given):
    error: Any = None
    cancelled: bool = _at("metadata", "was_cancelled", default=False)
    phase: str = _at("metadata", "benchmark_phase", default="profiling")


class _Record(_Given):
    sent_ns: Annotated[int, Field(ge=0, le=2**63)] = _at("metadata", "request_start_ns")
    prompt: _Count = _at("metrics", "input_sequence_length", "value")
    output: _Tokens = _at("metrics", "output_sequence_length", "value")
    ttft_s: _Milliseconds = _at("metrics", "time_to_first_token", "value")
    ttft_unit: Literal["ms"] = _at("metrics", "time_to_first_token", "unit")
    latency_s: _Milliseconds = _at("metrics", "request_latency", "value")
    latency_unit: Literal["ms"] = _at("metrics", "request_latency", "unit")
    conversation: str | None = _at("metadata", "conversation_id", default=None)


def _records(documents: _Documents) -> list[Benchmark]:
    """AIPerf's ``profile_export.jsonl``: a line a request. It does not say how the load was
    offered. Requests of the warm-up are left out."""
    rows, failed, where, talks = list[_Row](), 0, "", list[str]()
    for where, content in documents:
        fate = _checked(_Fate, content, where)
        if fate.phase == "warmup" or fate.error is not None or fate.cancelled:
            failed += fate.phase != "warmup"
            continue
        one = _checked(_Record, content, where)
        rest_s = one.latency_s - one.ttft_s
        if rest_s < 0:
            raise UserError(f"{where}: metrics.request_latency: ends before the first token")
        rows.append((one.sent_ns / 1e9, one.prompt, one.output, one.ttft_s, rest_s))
        talks += [one.conversation] if one.conversation else []
    later = len(talks) - len(set(talks))
    unused = f"{later} requests are later turns of a conversation; what their prompts share with "
    note = f"{unused}earlier ones is not used" if later else ""
    return [_measured(where, rows, failed, {"tool": "AIPerf", "note": note})]


class _Stimulus(_Given):
    type: Literal["concurrency", "concurrency_burst", "poisson", "gamma", "constant"] | None = (
        _either("type", "arrival_pattern", "request_rate_mode", default=None)
    )
    rate: _Mean | None = _either("rate", "request_rate", default=None)
    concurrency: _Count | None = None
    smoothness: _Mean = 1.0


class _Offered(_Given):
    """How load is offered: the last of AIPerf's ``phases``, in older versions ``loadgen``, or
    GenAI-Perf's ``stimulus``, which has a constant rate."""

    phases: list[_Stimulus] = _at("input_config", "phases", default=[])
    loadgen: _Stimulus | None = _at("input_config", "loadgen", default=None)
    stimulus: _Stimulus = _at("input_config", "perf_analyzer", "stimulus", default=_Stimulus())

    def load(self) -> dict[str, Any]:
        of_aiperf = self.phases[-1] if self.phases else self.loadgen
        one = of_aiperf or self.stimulus
        kind = one.type or ("poisson" if of_aiperf or one.rate is None else "constant")
        return {
            "tool": "AIPerf" if of_aiperf else "GenAI-Perf",
            "rate": one.rate,
            "burstiness": {"constant": inf, "gamma": one.smoothness}.get(kind, 1.0),
            "concurrency": one.concurrency or (1 if one.rate is None else None),
        }


class _SummaryUnits(_Given):
    ttft: Literal["ms"] = _at("time_to_first_token", "unit")
    tpot: Literal["ms"] = _at("inter_token_latency", "unit", default="ms")


class _Summary(_Given):
    requests_count: _Rounded = _at("request_count", "avg")
    mean_prompt: _Mean = _at("input_sequence_length", "avg")
    mean_output: _Mean = _at("output_sequence_length", "avg")
    ttft_s: _MeanMs = _at("time_to_first_token", "avg")
    tpot_s: _TpotMs = _at("inter_token_latency", "avg", default=nan)
    output_tokens_per_s: _Mean = _at("output_token_throughput", "avg")
    duration_s: _Mean = _at("request_throughput", "avg")  # its inverse, times the requests
    failed: _Rounded = _at("error_request_count", "avg", default=0)


def _summary(where: str, content: dict[str, Any]) -> Benchmark:
    """AIPerf's ``profile_export_aiperf.json`` or GenAI-Perf's ``*_genai_perf.json``."""
    load = _checked(_Offered, content, where).load()
    _checked(_SummaryUnits, content, where)
    means = vars(_checked(_Summary, content, where))
    means["duration_s"] = means["requests_count"] / means["duration_s"]
    return Benchmark(**load, **means)


def _raw(where: str, content: dict[str, Any]) -> Benchmark:
    problem = "GenAI-Perf's raw export has no token counts: give the *_genai_perf.json beside it"
    raise UserError(f"{where}: {problem}, or measure with {TOOLS['AIPerf']}")


class _GuidellmStrategy(_Given):
    type_: Literal["synchronous", "concurrent", "throughput", "constant", "poisson", "trace"]
    rate: _Mean | None = None
    clients: _Count | None = _either("streams", "max_concurrency", default=None)


class _GuidellmRequest(_Given):
    sent_s: _Time = _either("request_start_time", "start_time")
    prompt_tokens: _Count
    output_tokens: _Tokens
    ttft_s: _Milliseconds = _at("time_to_first_token_ms")
    tpot_s: _Milliseconds | None = _at("inter_token_latency_ms", default=None)

    @property
    def row(self) -> _Row:
        rest_s = (self.tpot_s or 0.0) * (self.output_tokens - 1)
        return self.sent_s, self.prompt_tokens, self.output_tokens, self.ttft_s, rest_s


class _GuidellmCounts(_Given):
    successful: _Tokens
    errored: _Tokens
    incomplete: _Tokens


class _GuidellmRun(_Given):
    """guidellm 0.3 has ``args`` in place of ``config``, and ``request_totals`` in the run."""

    strategy: _GuidellmStrategy = _either(
        AliasPath("config", "strategy"), AliasPath("args", "strategy")
    )
    totals: _GuidellmCounts = _either(AliasPath("metrics", "request_totals"), "request_totals")
    completed: list[_GuidellmRequest] = _at("requests", "successful")


class _GuidellmMeans(_Given):
    mean_prompt: _Mean = _at("metrics", "prompt_token_count", "successful", "mean")
    mean_output: _Mean = _at("metrics", "output_token_count", "successful", "mean")
    ttft_s: _MeanMs = _at("metrics", "time_to_first_token_ms", "successful", "mean")
    tpot_s: _TpotMs = _at("metrics", "inter_token_latency_ms", "successful", "mean")
    output_tokens_per_s: _Mean = _at("metrics", "output_tokens_per_second", "successful", "mean")
    duration_s: _Mean = _at("duration")


class _GuidellmFile(_Given):
    benchmarks: Annotated[list[dict[str, Any]], Field(min_length=1)]


def _report(documents: _Documents) -> list[Benchmark]:
    """guidellm's ``benchmarks.json``: a run for each load of a sweep."""
    return [
        _run(f"{where}: benchmarks.{number}", run)
        for where, content in documents
        for number, run in enumerate(_checked(_GuidellmFile, content, where).benchmarks)
    ]


def _run(where: str, content: dict[str, Any]) -> Benchmark:
    """A run, with all its requests if they were kept. Those that did not end have failed."""
    found = _checked(_GuidellmRun, content, where)
    strategy, totals = found.strategy, found.totals
    failed = totals.errored + totals.incomplete
    clients = 1 if strategy.type_ == "synchronous" else strategy.clients
    if clients is not None and clients >= totals.successful + failed:
        clients = None  # no limit: the tool writes a large one where none is given
    offered: dict[str, Any] = {
        "tool": "guidellm",
        "rate": strategy.rate,
        "burstiness": inf if strategy.type_ == "constant" else 1.0,
        "concurrency": clients,
    }
    if len(found.completed) < totals.successful:
        means = vars(_checked(_GuidellmMeans, content, where))
        return Benchmark(**offered, **means, requests_count=totals.successful, failed=failed)
    return _measured(where, [one.row for one in found.completed], failed, offered)


class _Line(_Given):
    input_toks: _Count
    output_toks: _Count
    queued_ts: _Time
    first_token_ts: _Time
    last_token_ts: _Time


def _lines(documents: _Documents) -> list[Benchmark]:
    """``requests.jsonl``: a line a request, with times of the server's clock."""
    rows, where = list[_Row](), ""
    for where, content in documents:
        one = _checked(_Line, content, where)
        if not one.queued_ts < one.first_token_ts <= one.last_token_ts:
            order = "queued_ts, first_token_ts and last_token_ts must follow each other"
            raise UserError(f"{where}: {order}")
        times = (one.first_token_ts - one.queued_ts, one.last_token_ts - one.first_token_ts)
        rows.append((one.queued_ts, one.input_toks, one.output_toks, *times))
    return [_measured(where, rows, 0, {"tool": "LLMServingSim"})]


_Reader = Callable[[_Documents], list[Benchmark]]


def _each(reader: Callable[[str, dict[str, Any]], Benchmark]) -> _Reader:
    return lambda documents: [reader(*document) for document in documents]


_READERS: dict[tuple[str, ...], _Reader] = {
    ("benchmarks",): _report,
    ("experiments",): _each(_raw),
    ("mean_ttft_ms", *_DETAILS): _each(_served),
    ("input_config",): _each(_summary),
    ("metadata",): _records,
    ("input_toks", "queued_ts"): _lines,
}
"""Readers by keys, of which the first object in a file has one; the first that fits reads it."""
