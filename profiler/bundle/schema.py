"""The format of a profile bundle: all op times reach the simulator through it.

A bundle is a folder ``<root>/<device>/<model>/tp<k>/`` with ``meta.yaml`` and one CSV per table of
:data:`TABLES`. Times are microseconds for ONE layer on ONE tensor-parallel rank (of whole ops where
they run beside the layers: ``profiler/facts/ops.py``). Measured, imported and modelled bundles look
alike; ``meta.yaml`` says which one it is. This module needs no torch.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pandas as pd

from ..facts.device import list_devices, load_device
from ..facts.formats import Kernels
from ..facts.model import ModelSpec
from ..facts.ops import ALL_REDUCE, ATTENTION, OPS
from ..storage.files import files_sha256, make_folders, remove_empty, restore
from ..storage.manifest import (
    NotOursError,
    check_ours,
    read_manifest,
    replace_folder,
)
from ..storage.plain_yaml import dump_yaml, read_mapping
from ..storage.strict import parse, strict_dataclass
from .tables import TABLES as TABLES
from .tables import BundleError as BundleError
from .tables import empty_table, read_table, write_table

FORMAT_VERSION = 1
#: Fields of a model that a bundle does not hold where they have these values.
_NEWER = {
    "experts": None, "norms_per_layer": 2, "windows": None, "latent": None, "dtype": "bf16",
    "kv_cache_dtype": "bf16", "moe_dtype": None,
}  # fmt: skip
KIND, MEASURED_KIND = "sarathi-sim bundle 1", "sarathi-sim measured bundle 1"
#: Bundles named in a message; the others are counted.
_NAMED = 8


@strict_dataclass
class KernelOrigin:
    """The origin of a modelled bundle's kernels: ``sha256`` of their files, and every op's
    half-width in percent of the 90 % band around its fitted times."""

    used: Kernels
    sha256: str
    half_width_pct: dict[str, float]


@strict_dataclass
class BundleMeta:
    """The origin of a bundle's numbers.

    ``device_file_sha256`` is the device model's hash for a modelled bundle. ``tile`` is the token
    granularity both sides of whose multiples are sampled. ``environment`` holds the facts of a
    measurement (driver, torch, clocks, ...). ``content_sha256`` covers the CSVs; writing sets it.
    """

    device: str
    model: str
    model_spec: ModelSpec
    tp: int
    source: Literal["measured", "imported", "modelled"]
    created: str
    generator: str
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    tile: int = 128
    num_layers_profiled: int = 1
    notes: str = ""
    environment: dict[str, str | int | float] = field(default_factory=dict)
    device_file_sha256: str | None = None
    kernels: KernelOrigin | None = None
    content_sha256: str = ""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version must be {FORMAT_VERSION}, got {self.format_version}")
        for key in ("tp", "tile", "num_layers_profiled"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.source == "modelled" and self.device_file_sha256 is None:
            raise ValueError("device_file_sha256 is required where source is modelled")


@dataclass(frozen=True, eq=False)
class Bundle:
    """Op times of one model shard on one device; the frames have the columns of TABLES. Each frame
    of a measured bundle also has the ``extras`` of its table. ``all_reduce`` is empty for tp 1;
    ``send_recv`` may be empty, as the later tables often are."""

    meta: BundleMeta
    linear: pd.DataFrame
    attn_prefill: pd.DataFrame
    attn_decode: pd.DataFrame
    all_reduce: pd.DataFrame
    send_recv: pd.DataFrame
    attn_decode_skew: pd.DataFrame = field(
        default_factory=lambda: empty_table(TABLES["attn_decode_skew"])
    )
    mixed: pd.DataFrame = field(default_factory=lambda: empty_table(TABLES["mixed"]))
    overhead: pd.DataFrame = field(default_factory=lambda: empty_table(TABLES["overhead"]))

    def tables(self) -> dict[str, pd.DataFrame]:
        """The frames by table name, in the order of TABLES."""
        return {name: getattr(self, name) for name in TABLES}

    @property
    def lacking(self) -> list[str]:
        """The ops that a run needs and no table has; transfers between stages apart."""
        meta, has = self.meta, {*self.linear["op"]}
        has |= {name for name, frame in self.tables().items() if len(frame)}
        needed = [
            *meta.model_spec.row_ops,
            *ATTENTION,
            *([ALL_REDUCE] if meta.tp > 1 else []),
        ]
        return [op for op in needed if op not in has]

    @property
    def modelled(self) -> list[str]:
        """The ops that an import marks as the calibrated device's: a run asks it for those that no
        table has."""
        marks = self.meta.environment if self.meta.source == "imported" else {}
        return [op for op, mark in marks.items() if str(mark).startswith("modelled: ")]


def bundle_path(root: Path, device: str, model: str, tp: int) -> Path:
    """Where a bundle lies under ``root``."""
    return root / device / model / f"tp{tp}"


def list_bundles(root: Path) -> list[tuple[str, str, int]]:
    """(device, model, tp) of every bundle folder under ``root``, sorted."""
    found = []
    for meta in root.glob("*/*/tp*/meta.yaml"):
        degree = meta.parent.name.removeprefix("tp")
        if degree.isdecimal():
            found.append((meta.parent.parent.parent.name, meta.parent.parent.name, int(degree)))
    return sorted(found)


def find_bundle(root: Path, device: str, model: str, tp: int) -> Path:
    """The folder of one bundle under ``root``. Raises BundleError if there is none, and names the
    existing ones and how to make it."""
    path = bundle_path(root, device, model, tp)
    if (path / "meta.yaml").is_file():
        return path
    existing = ", ".join(f"{d}/{m}/tp{k}" for d, m, k in list_bundles(root)) or "none"
    if device in list_devices() and load_device(device).fitted is None:
        way = (
            f"{device} has no op times without a stack: a bundle must be measured on one, or "
            "stack must name one whose kernels were measured there (sarathi-sim list devices)"
        )
    elif device in list_devices():
        way = f"without profiles the calibrated model of {device} is asked"
    else:
        way = "to measure one: sarathi-sim profile, on that device"
    raise BundleError(
        f"no profile bundle for device {device}, model {model}, tp {tp} under {root}; "
        f"there are: {existing}; {way}"
    )


def load_bundle(path: Path) -> Bundle:
    """The bundle in a folder, checked.

    Raises UserError, naming file, row (the header is row 1) and value: a missing file or column, a
    truncated line, NaN or a wrong type, a time that is not positive, an unknown op, a duplicated
    or unsorted key, or content that does not match the hash in ``meta.yaml``.
    """
    meta_path = path / "meta.yaml"
    if not meta_path.is_file():
        raise BundleError(f"{meta_path}: no such file{_bundles_below(path)}")
    meta = parse(BundleMeta, read_mapping(meta_path), meta_path)
    tables = {name: read_table(path / f"{name}.csv", table) for name, table in TABLES.items()}
    bundle = Bundle(meta=meta, **tables)
    _check_complete(bundle, path)
    actual = _content_sha256(path)
    if actual != meta.content_sha256:
        raise BundleError(
            f"{meta_path}: content_sha256 is {meta.content_sha256!r} but the CSVs hash to "
            f"{actual!r}: a file was changed after the bundle was written"
        )
    return bundle


def _bundles_below(path: Path) -> str:
    """For a message about a root of bundles, or a part of one, that was given for a bundle."""
    found = [
        meta.parent for depth in ("*", "*/*", "*/*/*") for meta in path.glob(f"{depth}/meta.yaml")
    ]
    if not found:
        return ""
    named = ", ".join(str(folder) for folder in sorted(found)[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"; give one of the bundles below: {named}{more}"


def check_replaceable(path: Path, *, force: bool = False) -> None:
    """Check that a bundle may be written to the folder ``path``. It is missing, empty, or a bundle
    as we wrote it; one that was measured is replaced only with ``force``. Raises BundleError, which
    names files that are not ours."""
    restore(path)
    try:
        check_ours(path, KIND, MEASURED_KIND)
    except NotOursError as error:
        raise BundleError(f"{path}: {error}") from None
    found = read_manifest(path)
    if found is not None and found.kind == MEASURED_KIND and not force:
        raise BundleError(
            f"{path}: holds a measured bundle, which is not replaced: give --force to "
            "replace it, or name another folder"
        )


def write_bundle(bundle: Bundle, path: Path, *, force: bool = False) -> BundleMeta:
    """Write ``bundle`` to the folder ``path``, replacing an earlier one; returns its meta. The same
    bundle gives the same bytes. A reader sees the old folder or the new one, never half. Raises
    BundleError for frames that a reader would refuse, and as :func:`check_replaceable`."""
    check_replaceable(path, force=force)
    made = make_folders(path.parent)
    scratch = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        scratch.mkdir()
        for name, frame in bundle.tables().items():
            table = TABLES[name]
            if len(frame) or not table.optional:
                write_table(frame, scratch / f"{name}.csv", table)
        meta = dataclasses.replace(bundle.meta, content_sha256=_content_sha256(scratch))
        fields = dataclasses.asdict(meta)
        if meta.kernels is None:
            del fields["kernels"]
        for key, value in _NEWER.items():
            if getattr(meta.model_spec, key) == value:
                del fields["model_spec"][key]
        text = dump_yaml(fields)
        (scratch / "meta.yaml").write_text(text, encoding="utf-8")
        load_bundle(scratch)
        kind = MEASURED_KIND if meta.source == "measured" else KIND
        replace_folder(scratch, path, kind, over=(KIND, MEASURED_KIND))
    except NotOursError as error:
        raise BundleError(f"{path}: {error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        remove_empty(made)
    return meta


def _content_sha256(path: Path) -> str:
    files = (path / f"{name}.csv" for name in TABLES)
    return files_sha256(file for file in files if file.is_file())


def _check_complete(bundle: Bundle, path: Path) -> None:
    for op in bundle.lacking:
        if op not in bundle.modelled:
            table = OPS[op].table
            what = f"op {op!r} has no rows" if table == "linear" else f"needed for {op}"
            raise BundleError(f"{path / table}.csv: {what}")
