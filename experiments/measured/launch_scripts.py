"""The launch settings of a measured server: ``data/serving/launch_scripts.yaml``, read for one row.

Its entries are the engines' defaults, the known settings of ``nvidia_gap_sweep``, and the launch
scripts of SemiAnalysis InferenceX (``benchmarks/single_node`` and its older versions). Entries that
fit a row override each other in order. A setting from no document is ``inferred``, with the
evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from typing import Any

from sarathi_sim.experiments.lab.sources.aiconfigurator import SYSTEMS
from sarathi_sim.experiments.measured.servers import Measured
from sarathi_sim.policies.request import release_of
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.facts.engines import engine_facts, memory_class
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import parse, strict_dataclass

#: AIConfigurator's system -> shipped device.
DEVICES = {system: device for device, system in SYSTEMS.items()}
Condition = dict[str, Any]
Settings = dict[str, Any]

INFERENCEX = "inferencex"
#: AIConfigurator's tables under this name repeat InferenceX's numbers (58 of 61 loads of both).
_REPEATED = "nvidia_gap_csv"
_MIB = 2**20
_VLLM_DEFAULTS = (
    *("max_num_batched_tokens", "max_num_seqs", "async_scheduling", "gpu_memory_utilization"),
)
_UNDATED = "0.27"
"""The release for which a build without one is taken: those measured are of 2025 and 2026."""


@strict_dataclass
class BenchmarkLoad:
    """The requests of each benchmark: ``rounds`` of requests per client and, from the day
    ``warm_since`` on, ``warm_up_rounds`` before them."""

    documents: list[str]
    rounds: int
    warm_up_rounds: int
    warm_since: str


@strict_dataclass
class ScriptCase:
    """Settings of some rows of an entry."""

    when: Condition
    set: Settings


@strict_dataclass
class LaunchScript:
    """Settings of all rows with the columns ``of``, and those of its ``cases``, in their order.

    A condition is a value, a list of values, or a range ``{from: ..., below: ...}``, which excludes
    rows without the column. A setting is a value, or a factor times columns of the row, ``plus`` a
    number, rounded up to a ``multiple``, and at ``least`` one. ``expert_parallel: as_row`` and
    ``attention_dp: true`` trust the row's layout. ``also`` are settings that no scenario has.
    """

    of: Condition
    set: Settings
    documents: list[str] = field(default_factory=list)
    inferred: str = ""
    cases: list[ScriptCase] = field(default_factory=list)
    also: dict[str, Any] = field(default_factory=dict)


@strict_dataclass
class LaunchScripts:
    """The file."""

    load: BenchmarkLoad
    entries: list[LaunchScript]


@lru_cache(maxsize=1)
def launch_scripts() -> LaunchScripts:
    """The shipped file. Raises SpecError if it is damaged."""
    path = data_dir() / "serving" / "launch_scripts.yaml"
    return parse(LaunchScripts, read_mapping(path), path)


def origin(row: Measured) -> str:
    """The origin of the row's measurement: its source, or the source that this one repeats."""
    return INFERENCEX if row.source == _REPEATED else row.source


def settings_of(row: Measured) -> Settings:
    """The known settings of the row's server: of the policy and the memory by their names in a
    configuration, ``kv_cache_dtype``, ``expert_parallel`` and ``attention_dp``.
    SGLang's limits are those of all ranks, other engines' of one."""
    known: Settings = {}
    if row.backend == "vllm":
        facts, version = engine_facts("vllm"), row.backend_version
        version = version if _release(version) else _UNDATED
        device = DEVICES.get(row.system)  # (one that is not known is refused later)
        memory = memory_class(load_device(device)) if device else ""
        known |= {key: facts.at(key, version, memory=memory) for key in _VLLM_DEFAULTS}
    for entry in launch_scripts().entries:
        if _holds(row, entry.of):
            parts = [entry.set, *(case.set for case in entry.cases if _holds(row, case.when))]
            known |= {key: _value(row, it) for part in parts for key, it in part.items()}
    return known


def of_a_rank(server: Settings, ranks: int) -> Settings:
    """The limits of each of SGLang's ranks with data-parallel attention, of those of their server:
    ``server_args.py``, ``_handle_data_parallelism``, and ``kv_cache_configurator.py``,
    ``resolve_max_num_reqs``."""
    divided = ("chunked_prefill_size", "max_running_requests")
    return {key: max(server[key] // ranks, 1) for key in divided if server.get(key)}


def sglang_memory(device: DeviceSpec, tp: int, pp: int = 1, ranks: int = 1) -> Settings:
    """SGLang's defaults that follow from a GPU's memory: the chunk, and the static share.

    Reserved are, in MiB, 512, 1.5 a token of the chunk, 2 a sequence of the largest CUDA graph (and
    3 for each rank of data-parallel attention, 4.5 if it has more than 300), and 128 a GPU; at
    least 10 GiB of more than 60. Source: ``handle_gpu_memory_settings`` of SGLang
    0.5.23, ``arg_groups/memory_hook.py``, without what it reserves for CUDA graphs of prompts;
    older versions have the same form.
    """
    total = (device.reported_bytes or device.memory_bytes) / _MIB
    tp, large = tp * ranks, total >= 60 * 1024
    chunk = 16384 if total >= 160 * 1024 else 8192 if large else 4096
    graph = 512 if total >= 160 * 1024 or (large and tp >= 4) else 256
    if not large:
        graph = 160 if tp >= 4 else 32
    reserved = 512 + 1.5 * chunk + 2 * graph + tp * pp / 8 * 1024
    if ranks > 1:
        reserved += graph * ranks * (4.5 if graph > 300 else 3)
    if large:
        reserved = max(reserved, 10 * 1024)
    share = round((total - reserved) / total, 3)
    return {"chunked_prefill_size": chunk, "mem_fraction_static": share}


def _release(text: str) -> tuple[int, ...]:
    """The version's numbers; empty for a text that begins with none."""
    return release_of(text) if text[:1].isdigit() else ()


def _holds(row: Measured, when: Condition) -> bool:
    return all(_matches(row, column, wanted) for column, wanted in when.items())


def _matches(row: Measured, column: str, wanted: Any) -> bool:
    value = origin(row) if column == "source" else getattr(row, column)
    if not isinstance(wanted, dict):
        return value in wanted if isinstance(wanted, list) else value == wanted
    of: Any = _release if column == "backend_version" else lambda bound: bound
    if not (known := of(value) if value else None):
        return False
    low, high = wanted.get("from"), wanted.get("below")
    return (low is None or of(low) <= known) and (high is None or known < of(high))


def _value(row: Measured, given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    terms = dict(given)
    step, least, total = terms.pop("multiple", 1), terms.pop("least", 0), terms.pop("plus", 0)
    total += sum(times * getattr(row, column) for column, times in terms.items())
    return max(-(-total // step) * step, least)
