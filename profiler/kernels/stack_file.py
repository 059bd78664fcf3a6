"""The shipped kernels of a device and a stack: a YAML with their errors, a .npz of surfaces.

Every surface is a :class:`StoredSurface`: a dataclass of arrays, stored in one way.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from ..facts.device import engine_facts, list_devices, load_device
from ..facts.formats import STACKS, Stack, release
from ..facts.ops import ALL_REDUCE, MOE
from ..storage.files import data_dir, files_sha256, write_whole
from ..storage.plain_yaml import dump_yaml, read_mapping
from ..storage.strict import SpecError, parse, strict_dataclass

Arrays = Mapping[str, npt.NDArray[Any]]
#: GPUs of one architecture have the same kernels.
BLACKWELL = ("b200-sxm", "b300-sxm", "gb200")
HOPPER = ("h100-80g-sxm", "h200-sxm")
#: Steps of a stored logarithm: 0.06 %.
STEPS = 1800.0


class StoredSurface:
    """A dataclass of arrays by name, one tuple ``sizes`` of them, or a flag. Logarithms
    (``log_...``) are stored as 16-bit integers, all else as plain integers."""

    whole: ClassVar[tuple[str, ...]] = ()
    """Fields that are integers in use, too."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """As plain integers."""
        found: dict[str, npt.NDArray[Any]] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value = field.name, getattr(self, field.name)
            if name.startswith("log_"):
                found[name] = np.round(STEPS * value).astype(np.int16)
            elif isinstance(value, bool):
                found[name] = np.array([value], np.int16)
            elif isinstance(value, tuple):
                found |= {f"size{i}": size.astype(np.int32) for i, size in enumerate(value)}
            else:
                found[name] = value.astype(np.int32)
        return found

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Self:
        """The surface of stored :meth:`arrays`."""
        found: dict[str, Any] = {}
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            name = field.name
            if name.startswith("log_"):
                found[name] = arrays[name].astype(np.float64) / STEPS
            elif isinstance(field.default, bool):
                found[name] = bool(arrays[name][0])
            elif name == "sizes":
                axes = [key for key in ("size0", "size1") if key in arrays]
                found[name] = tuple(arrays[key].astype(np.float64) for key in axes)
            else:
                found[name] = arrays[name].astype(np.int64 if name in cls.whole else np.float64)
        return cls(**found)


@strict_dataclass
class LeftOut:
    """Absolute errors in percent on ``rows`` left out of the fit.

    ``median_pct`` and ``p95_pct`` are against the cleaned rows, ``measured_*`` against the rows as
    published. ``half_width_pct`` covers 90 % of further errors; ``covered_pct`` is the coverage of
    a half-width taken from the other half of the rows.
    """

    rows: int
    median_pct: float
    p95_pct: float
    worst_pct: float
    measured_median_pct: float
    measured_p95_pct: float
    half_width_pct: float
    covered_pct: float


@strict_dataclass
class KernelFit:
    """One table's surface: the version of the stack, its number of rows, and its errors.

    ``repaired_pct`` of the rows were lowered by more than 5 % by the cleaning, and
    ``repaired_far_pct`` by more than a third. ``raised_pct`` were faster than memory allows.
    ``left_out`` has the errors by kind of hold-out. A borrowed table names its ``lender``, a GPU,
    and by how many percent its bands are wider (:mod:`sarathi_sim.profiler.kernels.borrowed`).
    ``kernel`` is the published name of what was timed; ``unlike`` says how this differs from what
    the engine's server runs, so that another version's table, or another stack's, stands for it;
    ``instead`` of which nearer table this one was taken.
    """

    version: str
    rows: int
    numbers: int
    repaired_pct: float
    repaired_far_pct: float
    left_out: dict[str, LeftOut]
    raised_pct: float = 0.0
    lender: str = ""
    lent_pct: float = 0.0
    kernel: str = ""
    unlike: str = ""
    instead: str = ""

    def half_width_pct(self, kind: str, unknown: float) -> float:
        """Half-width in percent of times that a kind of hold-out judges; ``unknown`` without."""
        own = self.left_out[kind].half_width_pct if kind in self.left_out else unknown
        return round(float(np.hypot(own, self.lent_pct)), 2) if self.lender else own

    def origin(self, exact: bool) -> str:
        """The kind of origin of its times at ``exact`` sizes of the table, or between them."""
        return "derived" if self.lender else "measured" if exact else "interpolated"


@strict_dataclass
class StackSpec:
    """The fitted kernels of one stack on one device.

    ``floor_us`` is the least time of an elementwise kernel. ``kernels`` is by table:
    ``gemm.<dtype>``, ``prefill.<kv dtype>.<head_dim>``, ``decode.<kv dtype>.<head_dim>``,
    ``all_reduce.<kernel>.<gpus>``; ``prefix.<kv dtype>.<head_dim>`` where chunks after cached
    tokens were measured, ``added.<kv dtype>.<head_dim>`` where calls of several prompts were (by
    batch and chunk), and ``elementwise.<op>`` where elementwise kernels were. ``wide.<...>`` are
    experts that many ranks share, and their exchanges of tokens
    (:mod:`sarathi_sim.profiler.kernels.wide_times`).
    """

    device: str
    stack: str
    origin: str
    licence: str
    date: str
    floor_us: float
    floor_source: str
    kernels: dict[str, KernelFit]

    def having(self, family: str) -> list[str]:
        """The names of the tables ``family.<name>``."""
        start = f"{family}."
        return sorted(k.removeprefix(start) for k in self.kernels if k.startswith(start))

    def need(self, family: str, name: str, what: str) -> None:
        """Raises SpecError where ``family.name`` was not measured."""
        if f"{family}.{name}" not in self.kernels:
            raise SpecError(
                f"no {family} of {self.stack} was measured on {self.device} for {what} {name}; "
                f"measured: {', '.join(self.having(family)) or 'none'}"
            )


class _Unpacked(Arrays):
    """The arrays of an ``.npz`` file, each unpacked once, when it is first asked for."""

    def __init__(self, content: bytes) -> None:
        self._file = np.load(BytesIO(content), allow_pickle=False)
        self._found: dict[str, npt.NDArray[Any]] = {}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._found:
            self._found[name] = self._file[name]
            self._found[name].setflags(write=False)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.files)

    def __len__(self) -> int:
        return len(self._file.files)


def stored(arrays: Arrays, table: str) -> Arrays:
    """The arrays of one table."""
    start = f"{table}."
    return {k.removeprefix(start): arrays[k] for k in arrays if k.startswith(start)}


def _folder(device: str) -> Path:
    """The folder of a device's kernels, or of the device with the same chip."""
    spec = load_device(device) if device in list_devices() else None
    return data_dir() / "kernels" / (spec.same_chip if spec and spec.same_chip else device)


def stack_files(device: str, stack: str) -> list[Path]:
    """The two shipped files of a stack on a device; if a version is named (``vllm@0.19``), the
    files of every version, the newest first."""
    engine, at, _ = stack.partition("@")
    folder, older = _folder(device), versions_on(device, engine) if at else []
    names = [engine, *(f"{engine}@{version}" for version in older)]
    paths = (folder / f"{name}{suffix}" for name in names for suffix in (".yaml", ".npz"))
    return [path for path in paths if path.is_file()]


def versions_on(device: str, engine: Stack | str) -> list[str]:
    """The versions of a stack on a device that ship beside the newest of each table."""
    found = (path.stem.partition("@")[2] for path in _folder(device).glob(f"{engine}@*.npz"))
    return sorted(found, key=release)


def stacks_on(device: str) -> list[Stack]:
    """The stacks with fitted kernels on a device."""
    return sorted(stack for stack in STACKS if len(stack_files(device, stack)) == 2)


@lru_cache(maxsize=32)
def load_stack(device: str, stack: str) -> tuple[StackSpec, Arrays]:
    """A shipped stack; its arrays are unpacked when asked for. With a version (``vllm@0.19``) every
    table is the nearest version's. Raises SpecError for an unknown stack, naming the known ones."""
    files = stack_files(device, stack)
    if len(files) < 2:
        there = ", ".join(stacks_on(device)) or "none"
        raise SpecError(
            f"no kernels of stack {stack} were fitted on device {device}; fitted: {there}"
        )
    each = [
        (parse(StackSpec, read_mapping(text), text), _Unpacked(numbers.read_bytes()))
        for text, numbers in zip(files[::2], files[1::2], strict=True)
    ]
    return _nearest(each, stack.partition("@")[2]) if "@" in stack else each[0]


#: Drift of kernels between two versions of an engine, in percent: the medians of nine in ten tables
#: of H100, H200 and B200 moved by less (without those that time another kernel than the server's).
#: All GEMMs in bf16 are cuBLAS's.
DRIFT_PCT = {"gemm.bf16": 2.2, "gemm": 23.0, "attention": 44.0, MOE: 41.0, "wide": 41.0}
DRIFT_PCT |= {ALL_REDUCE: 33.0}
#: Distance of these versions (:func:`release`): vLLM 0.19 and 0.24, SGLang 0.5.9 and 0.5.14,
#: TensorRT-LLM 1.2 and 1.3. The drift grows with the root of the distance.
_SPAN = {"vllm": 0.05, "sglang": 5e-4, "trtllm": 0.01}


def family_of(table: str) -> str:
    """The family of a table: tables that are fitted together, and drift together."""
    family = table.partition(".")[0]
    return "attention" if family in ("prefill", "decode", "added", "prefix") else family


def drift_pct(table: str) -> float:
    """The drift of a table between two versions; 0 where it does not depend on the engine's."""
    if ".nccl." in table:
        return 0.0
    return DRIFT_PCT.get(table, DRIFT_PCT.get(family_of(table), 0.0))


def _drifted(fit: KernelFit, table: str, engine: str, version: str) -> KernelFit:
    """A fit with its bands widened by the drift between its version and ``version``."""
    if not (most := drift_pct(table)):
        return fit
    apart = abs(release(fit.version) - release(version)) / _SPAN[engine]
    drift = most * min(1.0, apart) ** 0.5
    wider = {
        kind: replace(of, half_width_pct=round(float(np.hypot(of.half_width_pct, drift)), 2))
        for kind, of in fit.left_out.items()
    }
    return replace(fit, left_out=wider)


def _nearest(each: Sequence[tuple[StackSpec, Arrays]], version: str) -> tuple[StackSpec, Arrays]:
    """Each table of the nearest version; of equally near ones the newest (first); one that times
    another kernel than the server's only without any other. Times of several prompts in one call
    come from the version that times a single prompt.

    Older versions' tables have the newest's held-out errors. All bands are widened by the drift
    between the versions."""
    newest, wanted = each[0][0], release(version)
    fits, arrays = dict[str, KernelFit](), dict[str, Arrays]()
    for table, fit in newest.kernels.items():
        alone = alone_of(table)
        having = [one for one in each if alone in one[0].kernels]
        having.sort(key=lambda one: abs(release(one[0].kernels[alone].version) - wanted))
        like = (one for one in having if not one[0].kernels[alone].unlike)
        spec, of = next(like, having[0])
        if table in spec.kernels:
            chosen = replace(spec.kernels[table], left_out=fit.left_out)
            if spec is not having[0][0]:
                near = having[0][0].kernels[alone]
                chosen = replace(chosen, instead=f"{near.version}'s, which is {near.unlike}")
            fits[table] = _drifted(chosen, table, newest.stack, version)
            arrays |= {name: of for name in of if name.startswith(f"{table}.")}
    return replace(newest, kernels=fits), Chosen(arrays)


def alone_of(table: str) -> str:
    """The table of a single prompt beside one of several in a call; any other table itself."""
    family, _, rest = table.partition(".")
    return f"prefill.{rest}" if family == "added" else table


class Chosen(Arrays):
    """Arrays by name from several files."""

    def __init__(self, where: Mapping[str, Arrays]) -> None:
        self._where = where

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._where[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def tables_beside(device: str, stack: str, table: str) -> dict[Stack, Arrays]:
    """The other stacks' tables of this name on a device, for a stack that chooses among kernels."""
    others = (other for other in stacks_on(device) if other != stack.partition("@")[0])
    found = {other: stored(load_stack(device, other)[1], table) for other in others}
    return {other: arrays for other, arrays in found.items() if arrays}


def gemms_beside(device: str, stack: str, dtype: str) -> dict[Stack, Arrays]:
    """The other stacks' GEMMs of this format among which a stack's server chooses, too, while its
    own table holds one kernel; none for most.

    TensorRT-LLM's autotuner chooses at its start: its nvfp4 rows grow with k whatever n and m are,
    and are up to twice as slow as those of the same kind in the other stacks' tables. SGLang's
    fp8_block rows take 14 to 16 us for small GEMMs on Blackwell (5 to 6 on Hopper), where its
    server calls the kernels of TensorRT-LLM (6 us) through FlashInfer. From 0.17 on vLLM's
    servers run FlashInfer's and DeepGEMM's kernels on Hopper (its table of 0.24.0 says so, but
    holds the host's launches: 57 us at the least), and SGLang's table times the latter.
    """
    engine, _, version = stack.partition("@")
    chooses = (engine, dtype) == ("trtllm", "nvfp4")
    chooses |= (engine, dtype) == ("sglang", "fp8_block") and device in BLACKWELL
    deep = (engine, dtype) == ("vllm", "fp8_block") and device in HOPPER
    deep = deep and engine_facts("vllm").at("deep_gemm", version)
    found = tables_beside(device, engine, f"gemm.{dtype}") if chooses or deep else {}
    return {name: table for name, table in found.items() if not deep or name == "sglang"}


def stack_sha256(device: str, stack: str, lenders: Sequence[str] = ()) -> str:
    """Hash of a stack's files, and of those of GPUs that lend it tables."""
    return files_sha256(path for one in (device, *lenders) for path in stack_files(one, stack))


def surfaces_sha256(arrays: Arrays) -> str:
    """Hash of surfaces that no file holds."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.shape}\n".encode() + array.tobytes())
    return digest.hexdigest()


def write_stack(
    spec: StackSpec, arrays: Mapping[str, npt.NDArray[Any]], folder: Path
) -> list[Path]:
    """Write ``<device>/<stack>.yaml`` and ``.npz`` to ``folder``; returns both paths. The same fit
    gives the same bytes."""
    target = folder / spec.device
    target.mkdir(parents=True, exist_ok=True)
    content = BytesIO()
    np.savez_compressed(content, allow_pickle=False, **dict(sorted(arrays.items())))
    text, numbers = target / f"{spec.stack}.yaml", target / f"{spec.stack}.npz"
    write_whole(numbers, content.getvalue())
    plain = dataclasses.asdict(spec)
    for fit in plain["kernels"].values():
        for name in ("raised_pct", "lender", "lent_pct", "kernel", "unlike", "instead"):
            if not fit[name]:
                del fit[name]
    write_whole(text, dump_yaml(plain, width=96))
    return [text, numbers]
