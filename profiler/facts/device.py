"""A GPU as the simulator sees it: data-sheet numbers, and constants fitted to measurements; what
engines reserve and switch on there, by their version (``data/engines/ENGINE.yaml``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from ..storage.files import data_dir, files_sha256, user_path
from ..storage.not_modelled import not_modelled
from ..storage.plain_yaml import read_mapping
from ..storage.strict import SpecError, did_you_mean, parse, strict_dataclass
from .formats import MOE_SPEEDUP, STACKS, MoeDtype, Stack, release
from .ops import op_of

#: The central 90 % of a normal over its central 95 %.
_NINETY = 1.645 / 1.96
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@strict_dataclass
class Link:
    """A connection between GPUs: ``bandwidth`` in bytes per second, one GPU, one direction. Without
    ``peers`` a GPU cannot write into another one's memory: messages go through the host's."""

    kind: str
    bandwidth: float
    peers: bool = True


@strict_dataclass
class ErrorStats:
    """Absolute errors of predicted times in percent of the measured ones."""

    median_pct: float
    p95_pct: float
    worst_pct: float


@strict_dataclass
class FittedOp:
    """One op's constants, their source, and their errors on held-out rows.

    ``source`` names the measurements, ``origin`` their repository and commit, ``rows`` how many
    were used, ``hold_out`` how rows were held out for ``held_out`` (physics with the learned
    residual) and ``roofline_only`` (physics alone). ``structure`` splits ``held_out`` by ranges of
    the inputs. ``checks`` are rows of another source that no fit used. ``constants`` are the
    physics form's. ``stack_pct`` is the half-width that the kernels of another software stack, or a
    device that these were lent to, add to the 90 % band.
    """

    source: str
    origin: str
    licence: str
    rows: int
    hold_out: str
    held_out: ErrorStats
    roofline_only: ErrorStats
    date: str
    constants: dict[str, float]
    residual: bool
    structure: dict[str, ErrorStats]
    checks: dict[str, ErrorStats]
    notes: str = ""
    stack_pct: float = 0.0

    @property
    def half_width_pct(self) -> float:
        """The half-width of the 90 % band: the held-out errors (their 95th percentile, as a
        normal's) and the independent error of the stack."""
        return math.hypot(_NINETY * self.held_out.p95_pct, self.stack_pct)


@strict_dataclass
class DeviceSpec:
    """One GPU model. Sizes are decimal bytes, rates per second, ``peak_flops`` dense fp16 and bf16,
    ``format_flops`` dense in fp8 and nvfp4 where it has units for them.

    ``fitted`` is None for a device with specifications only: a configuration may name it, but no
    bundle can be modelled on it. ``reported_bytes`` is the memory that the driver reports for one
    GPU, ``l2_bytes`` its L2 (where a kernel's timing loop finds the weights that it left), where
    known. ``same_chip`` names the device whose kernels it runs, slower where memory bounds them.
    Raises ValueError for numbers that are not positive.
    """

    name: str
    memory_bytes: float
    peak_flops: float
    memory_bandwidth: float
    num_sms: int
    gpus_per_node: int
    intra_node: Link
    inter_node: Link
    reported_bytes: float | None = None
    l2_bytes: float | None = None
    same_chip: str | None = None
    notes: str = ""
    format_flops: dict[Literal["fp8", "nvfp4"], float] = field(default_factory=dict)
    fitted: dict[str, FittedOp] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        sizes = ("memory_bytes", "peak_flops", "memory_bandwidth", "num_sms", "gpus_per_node")
        given = {key: getattr(self, key) for key in (*sizes, "reported_bytes", "l2_bytes")}
        given |= {f"format_flops.{key}": value for key, value in self.format_flops.items()}
        for key, value in given.items():
            if value is not None and value <= 0:
                raise ValueError(f"{key} must be positive, got {value}")

    def peak_of(self, dtype: MoeDtype) -> float:
        """Dense FLOP/s of the units that compute with weights in a number format: those of bf16 for
        formats that are unpacked, and on a device without units of their own."""
        if MOE_SPEEDUP[dtype] == 1:
            return self.peak_flops
        return self.format_flops.get("nvfp4" if dtype == "nvfp4" else "fp8", self.peak_flops)

    def op(self, name: str) -> FittedOp:
        """The fitted constants of one op. Raises SpecError where the device has none."""
        if self.fitted is None:
            calibrated = [d for d in list_devices() if load_device(d).fitted is not None]
            raise SpecError(
                f"device {self.name} has no op times without a stack: name one whose kernels were "
                "measured on it (sarathi-sim list devices), or a device that is calibrated: "
                f"{', '.join(calibrated)}"
            )
        if name not in self.fitted:
            raise SpecError(f"device {self.name}: op {name!r} has no fit")
        return self.fitted[name]

    def behind(self, op: str, tp: int) -> list[FittedOp]:
        """The fits that predict an op of a bundle on ``tp`` ranks; empty without any."""
        fits, names = self.fitted or {}, op_of(op).fitted or (op,)
        return [fits[name] for name in (name.format(tp=tp) for name in names) if name in fits]


def device_files(name: str) -> list[Path]:
    """The files that define a shipped device: its YAML, and its learned residual if it has one."""
    folder = data_dir() / "devices"
    return [p for p in (folder / f"{name}.yaml", folder / f"{name}.npz") if p.is_file()]


def device_sha256(name: str) -> str:
    """Hash of everything that :func:`device_files` lists, names included."""
    return files_sha256(device_files(name))


def list_devices() -> list[str]:
    """Names of the shipped devices, sorted."""
    return list(_listed(data_dir() / "devices"))


@cache
def _listed(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


#: Shipped devices by the product name that NVIDIA's driver reports, where it is not theirs.
_PRODUCTS = {
    "NVIDIA A100-SXM4-40GB": "a100-40g-sxm",
    "NVIDIA A100-SXM4-80GB": "a100-80g-sxm",
    "NVIDIA B200": "b200-sxm",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA H100 80GB HBM3": "h100-80g-sxm",
    "NVIDIA H200": "h200-sxm",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
}


def product_folder(product: str) -> str:
    """The name that a measured device gets: "NVIDIA H200" becomes "h200"."""
    name = product.lower().removeprefix("nvidia").strip()
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "gpu"


def shipped_device(name: str, product: str = "") -> DeviceSpec | None:
    """The data sheet of a bundle's device: by its name, or by the ``product`` it was measured on.
    None if none is shipped. ``name`` may be :func:`product_folder`'s."""
    known = {product_folder(product): shipped for product, shipped in _PRODUCTS.items()}
    for found in (_PRODUCTS.get(product), name, product_folder(product), known.get(name)):
        if found in list_devices():
            return load_device(found)
    return None


def load_device(name_or_path: str | Path) -> DeviceSpec:
    """A shipped device by its name, or by the first words of it (h200) where no other begins so; or
    one from a YAML file. Raises SpecError for an unknown name (and lists the known ones), and for
    an invalid file."""
    path = user_path(name_or_path)
    if path.suffix != ".yaml":
        name = str(name_or_path)
        alike = [each for each in list_devices() if each.startswith(f"{name.lower()}-")]
        name = alike[0] if len(alike) == 1 else name
        path = data_dir() / "devices" / f"{name.lower()}.yaml"
        if not (_NAME.fullmatch(name) and path.is_file()):
            if limit := not_modelled(name, "device"):
                raise SpecError(f"device {name!r}: {limit}")
            if alike:
                raise SpecError(f"device {name!r}: may be {' or '.join(alike)}: give one")
            raise SpecError(
                f"unknown device {name!r}{did_you_mean(name.lower(), list_devices(), 'device')}; "
                f"shipped: {', '.join(list_devices())}; or the path of a device YAML"
            )
    if not path.is_file():
        raise SpecError(f"{path}: no such file")
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=32)
def _read(path: Path, changed: int) -> DeviceSpec:
    """A device file, read once unless it was ``changed``: it takes 3 to 80 ms, and runs need it
    again and again."""
    return parse(DeviceSpec, read_mapping(path), path)


@strict_dataclass
class Fact:
    """A value, its source, and when it holds: for versions from ``since`` on and before ``until``
    (empty: all), and where each key of ``when`` has that value. Of a fact's rows the first that
    holds counts."""

    value: bool | int | float
    source: str
    since: str = ""
    until: str = ""
    when: dict[str, str] = field(default_factory=dict)

    def holds(self, version: str, about: Mapping[str, Any]) -> bool:
        """Whether it does for a version, and what is known ``about`` the server."""
        early = self.since and release(version) < release(self.since)
        late = self.until and release(version) >= release(self.until)
        return not early and not late and all(about.get(k) == v for k, v in self.when.items())


@strict_dataclass
class EngineFacts:
    """The facts of an engine; ``lockstep`` are the versions whose decisions are reproduced."""

    lockstep: list[str]
    facts: dict[str, list[Fact]]

    @property
    def newest(self) -> str:
        """The newest version whose decisions are reproduced; empty if none are."""
        return self.lockstep[-1] if self.lockstep else ""

    def at(self, fact: str, version: str = "", **about: Any) -> Any:
        """The value of a fact in a version (empty: the newest known). Raises KeyError without."""
        rows = self.facts.get(fact, [])
        known = version or self.newest or "999"
        found = next((row.value for row in rows if row.holds(known, about)), None)
        if found is None:
            raise KeyError(fact)
        return found


def memory_class(device: DeviceSpec) -> str:
    """The class of a GPU by which vLLM chooses its limits (``vllm/engine/arg_utils.py``,
    ``get_batch_defaults``): "huge" from 160 GiB on, "large" from 70 on but for A100, "small"."""
    gib = device.memory_bytes / 2**30
    if gib >= 160:
        return "huge"
    return "large" if gib >= 70 and not device.name.startswith("a100") else "small"


def capability(device: DeviceSpec) -> str:
    """The compute capability of a GPU for whose kind engines have numbers of their own; else
    empty."""
    kinds = {
        "90": ("h100", "h200"),
        "100": ("b200", "gb200"),
        "103": ("b300", "gb300"),
    }
    return next((kind for kind, names in kinds.items() if device.name.startswith(names)), "")


@cache
def engine_facts(name: Stack) -> EngineFacts:
    """The facts of an engine, as shipped. Raises SpecError for a file that is none."""
    path = data_dir() / "engines" / f"{name}.yaml"
    return parse(EngineFacts, read_mapping(path), str(path))


def engines() -> dict[Stack, EngineFacts]:
    """Every engine."""
    return {name: engine_facts(name) for name in STACKS}
