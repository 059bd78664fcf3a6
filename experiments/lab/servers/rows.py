"""Tables of measured servers, how each was started, and the predictions for each row.

A row has a deployment, a load, and measured means: the columns of NVIDIA AIConfigurator's
``silicon_sample.csv``. The load is a closed loop of ``concurrency`` clients with prompts of ``isl``
and outputs of ``osl`` tokens, each times a factor between ``length_range_ratio`` and 1. A row that
cannot be read is refused alone.

A launch list has a row for each measured server with pools (``id``): the layout of both
(``prefill_workers, prefill_tp, prefill_ep, prefill_dp_attention``, the same of ``decode``) and, as
``prefill:KEY`` and ``decode:KEY``, the engine's own settings: InferenceX's run lists
(``.github/configs/nvidia-master.yaml``), and the recipes that they name (NVIDIA/srt-slurm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sarathi_sim.profiler.bundle.tables import read_cells
from sarathi_sim.profiler.storage.strict import UserError, did_you_mean, mistakes
from sarathi_sim.simulator.loop.records import Floats
from ...config.scenario import POOLS

METRICS = ("ttft", "tpot")
"""The metrics that every row has, to which constants are fitted."""
SCORED = {metric: f"{metric}_ms" for metric in (*METRICS, "latency")}
SCORED |= {"throughput": "output_tokens_per_s"}
"""All predicted and scored metrics, with their names in tables."""

_Number = TypeVar("_Number", float, Floats)
_Row = TypeVar("_Row", bound=BaseModel)
Name = Annotated[str, Field(min_length=1, max_length=300)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
_Count = Annotated[int, Field(ge=1, le=2**20)]
_Limit = Annotated[int, Field(ge=1, le=2**24)]
_Layout = Annotated[int, Field(ge=0, le=2**20)]  # dense rows may have 0
_Chunk = Annotated[int, Field(ge=-1, le=2**24)]
"""-1 and 0 are SGLang's words for no chunks."""


class StartedPool(BaseModel):
    """One pool: ``tp`` are the GPUs of a worker, each with attention of its own under
    ``dp_attention``. The other keys are the engines' settings by their names."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    workers: _Limit
    tp: _Limit
    ep: _Limit = 1
    dp_attention: bool = False
    max_batch_size: _Limit | None = None
    max_num_tokens: _Limit | None = None
    free_share: float | None = Field(None, alias="kv_cache_config.free_gpu_memory_fraction")
    static_share: float | None = Field(None, alias="mem-fraction-static")
    chunked_prefill_size: _Chunk | None = Field(None, alias="chunked-prefill-size")
    max_prefill_tokens: _Limit | None = Field(None, alias="max-prefill-tokens")
    max_running_requests: _Limit | None = Field(None, alias="max-running-requests")
    recv_interval: _Limit | None = Field(None, alias="scheduler-recv-interval")
    a2a: str | None = Field(None, alias="moe-a2a-backend")
    redundant: _Limit | None = Field(None, alias="ep-num-redundant-experts")
    slots: _Limit | None = Field(None, alias="load_balancer.num_slots")
    nextn: _Limit | None = Field(None, alias="speculative_config.num_nextn_predict_layers")
    steps: _Limit | None = Field(None, alias="speculative-num-steps")

    @property
    def ranks(self) -> int:
        """Ranks of data-parallel attention."""
        return self.tp if self.dp_attention else 1

    @property
    def layout(self) -> str:
        """In a word: ``2x dp8``."""
        return f"{self.workers}x {'dp' if self.dp_attention else 'tp'}{self.tp} ep{self.ep}"


class StartedServer(BaseModel):
    """How one row was started, if it is known; ``speculation`` is none, mtp, or both possible."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Name
    speculation: str = "none"
    prefill: StartedPool | None = None
    decode: StartedPool | None = None

    @property
    def draft_length(self) -> int:
        """Drafted tokens a decode; 0 where there are none, or may be none."""
        if self.speculation != "mtp" or self.decode is None:
            return 0
        return self.decode.nextn or self.decode.steps or 0

    @property
    def layout(self) -> str:
        """Of both pools, in words; empty where it is not known."""
        if self.prefill is None or self.decode is None:
            return ""
        drafts = f", {self.draft_length} drafts" if self.draft_length else ""
        return f"{self.prefill.layout} + {self.decode.layout}{drafts}"

    @model_validator(mode="before")
    @classmethod
    def _pools(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of each pool as one value."""
        row: dict[str, Any] = {}
        for name, value in given.items():
            pool = name.partition("_")[0].partition(":")[0]
            if pool in POOLS and name not in POOLS:
                row.setdefault(pool, {})[name[len(pool) + 1 :]] = value
            else:
                row[name] = value
        return row


class Measured(BaseModel):
    """One server under one load; ``ttft_ms`` and ``tpot_ms`` are means over its requests.

    ``flags`` say why a row is doubtful; ``mode`` is ``agg`` where prefill and decode share GPUs,
    and else ``launch`` says how both pools were started, if that is known. A missing version of
    vLLM is that of the benchmark's repository (docs/lab/servers_method.md says why of vLLM alone).
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Name
    backend: Name
    model: Name
    system: Name
    isl: _Count
    osl: Annotated[int, Field(ge=2, le=2**20)]  # a single token has no TPOT
    concurrency: _Count
    ttft_ms: Positive
    tpot_ms: Positive
    tp: _Count | None = None
    pp: _Count = 1
    dp: _Count = 1
    moe_tp: _Layout = 0
    moe_ep: _Layout = 1
    precision: str = "bf16"
    mode: str = "agg"
    dense: bool = True
    length_range_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    source: str = ""
    backend_version: str = ""
    measured_date: str = ""
    flags: str = ""
    latency_ms: Positive | None = None
    output_tokens_per_s: Positive | None = None
    launch: StartedServer | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_repository(cls, row: dict[str, Any]) -> dict[str, Any]:
        of = row.get("engine_version_from_inferencemax_repo")
        stated = row.get("backend_version") or row.get("backend") != "vllm" or not of
        return row if stated else {**row, "backend_version": of}

    @property
    def drafts(self) -> int:
        """Drafted tokens a decode. Where the launch list says MTP and no number (assumed): SGLang
        two, as all its known recipes; TensorRT-LLM three up to 64 clients a decode rank and one
        beyond, as 48 of 55 rows with a number."""
        launch = self.launch
        if launch is None or launch.decode is None or launch.speculation != "mtp":
            return 0
        if launch.draft_length or self.backend == "sglang":
            return launch.draft_length or 2
        return 3 if self.concurrency <= 64 * launch.decode.workers * launch.decode.ranks else 1

    def latency_of(self, ttft_ms: _Number, tpot_ms: _Number) -> _Number:
        """The mean latency of a request in ms that follows from mean TTFT and TPOT."""
        return ttft_ms + (self.osl * (1 + self.length_range_ratio) / 2 - 1) * tpot_ms

    def of(self, metric: str) -> float | None:
        """The measured value of one of :data:`SCORED`; None if there is none. A latency that the
        table lacks follows from the others."""
        if metric == "latency" and self.latency_ms is None:
            return self.latency_of(self.ttft_ms, self.tpot_ms)
        value: float | None = getattr(self, SCORED[metric])
        return value


@dataclass(frozen=True)
class ServerTimes:
    """Predicted means, ``bands`` of 90 % by metric, (low, high) in its unit, and whether the KV
    cache was full at a time."""

    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float | None = None
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    kv_full: bool = False

    def at(self, row: Measured, ttft_ms: float, tpot_ms: float) -> ServerTimes:
        """With other times; in a closed loop throughput goes as one over the latency."""
        rate = self.output_tokens_per_s
        if rate is not None:
            was = row.latency_of(self.ttft_ms, self.tpot_ms)
            rate *= was / row.latency_of(ttft_ms, tpot_ms)
        return replace(self, ttft_ms=ttft_ms, tpot_ms=tpot_ms, output_tokens_per_s=rate)

    def of(self, row: Measured, metric: str) -> float | None:
        """The predicted value of one of :data:`SCORED` for a row; None if there is none."""
        if metric == "latency":
            return row.latency_of(self.ttft_ms, self.tpot_ms)
        value: float | None = getattr(self, SCORED[metric])
        return value


Predictions = Mapping[str, ServerTimes]
"""By the row's id."""


def present(**values: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def read_tables(files: Sequence[Path], kind: type[_Row]) -> tuple[list[_Row], dict[str, str]]:
    """The rows of tables, and the reasons of refused ones by id (or ``row N``). Raises UserError
    for a file that is no such table, and for an id that stands in two of them."""
    rows: dict[str, _Row] = {}
    refused: dict[str, str] = {}
    for path in files:
        read, unread = read_table(path, kind)
        if again := rows.keys() & read.keys():
            raise UserError(f"{path}: the id {min(again)} is in an earlier file, too")
        rows, refused = rows | read, refused | unread
    return list(rows.values()), refused


def read_servers(
    files: Sequence[Path], launch: Path | None = None
) -> tuple[list[Measured], dict[str, str]]:
    """:func:`read_tables` of measured servers; a ``launch`` list, read as a whole, says how those
    with pools were started."""
    rows, refused = read_tables(files, Measured)
    if launch is not None:
        started = read_whole(launch, StartedServer)
        rows = [row.model_copy(update={"launch": started.get(row.id)}) for row in rows]
    return rows, refused


def read_whole(path: Path, kind: type[_Row]) -> dict[str, _Row]:
    """The rows of one file by id. Raises UserError for one that cannot be read."""
    rows, refused = read_table(path, kind)
    for name, reason in refused.items():
        raise UserError(f"{path}: {name}: {reason}")
    return rows


def read_table(path: Path, kind: type[_Row]) -> tuple[dict[str, _Row], dict[str, str]]:
    """The rows of one file, and the reasons of refused ones, by id."""
    cells = read_cells(path, dtype=str, keep_default_na=False)
    fields = kind.model_fields.items()
    needed = [field.alias or name for name, field in fields if field.is_required()]
    for name in needed:
        if name not in cells.columns:
            close = did_you_mean(name, list(cells.columns))
            raise UserError(f"{path}: column {name} is missing{close}; needed: {', '.join(needed)}")
    rows: dict[str, _Row] = {}
    refused: dict[str, str] = {}
    for line, cells_of in zip(cells.index, cells.to_dict("records"), strict=True):
        given = {str(name): value for name, value in cells_of.items() if value != ""}
        name = str(given.get("id", f"row {line}"))
        if name in rows or name in refused:
            refused[f"row {line}"] = f"the id {name} is given twice"
            continue
        try:
            rows[name] = kind.model_validate(given)
        except ValidationError as error:
            refused[name] = "; ".join(mistakes(error, kind, given, ".".join))
    return rows, refused
