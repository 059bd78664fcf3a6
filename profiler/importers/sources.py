"""The sources that can be imported, by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from profiler.bundle.schema import Bundle, BundleError
from profiler.facts.device import DeviceSpec, load_device
from profiler.facts.model import ModelSpec, load_model
from profiler.importers.aiconfigurator import import_aiconfigurator
from profiler.importers.llmservingsim import import_llmservingsim, measured_on
from profiler.importers.vidur import import_vidur
from profiler.storage.paths import WHERE
from profiler.storage.strict import did_you_mean


class Importer(Protocol):
    """A source's reader."""

    def __call__(
        self,
        folder: Path,
        model: ModelSpec,
        tp: int,
        device: DeviceSpec,
        created: str | None = None,
    ) -> Bundle:
        """A bundle from ``folder``. Raises BundleError for what cannot be had from it."""


@dataclass(frozen=True)
class _Entry:
    read: Importer
    device: Callable[[Path], str]


#: Readers, and the device that a folder is taken to be of where none is named.
SOURCES = {
    "vidur": _Entry(import_vidur, lambda _: "a100-80g-sxm"),
    "aiconfigurator": _Entry(import_aiconfigurator, lambda _: "a100-80g-sxm"),
    "llmservingsim": _Entry(import_llmservingsim, measured_on),
}


def import_bundle(
    source: str,
    folder: Path,
    model: str | Path,
    tp: int,
    device: str | None = None,
    created: str | None = None,
) -> Bundle:
    """The bundle of one ``tp`` rank of ``model`` from a folder of public measurements.

    ``folder`` is the source's own or the one that holds it. Raises BundleError (or SpecError, for
    an unknown model or device) with what is wrong and what is allowed, FileNotFoundError where a
    needed file is not there.
    """
    if source not in SOURCES:
        raise BundleError(
            f"unknown source {source!r}{did_you_mean(source, SOURCES)}; "
            f"allowed: {', '.join(SOURCES)}"
        )
    if not folder.is_dir():
        raise BundleError(f"{folder}: no such folder; {WHERE}")
    entry, spec = SOURCES[source], load_model(model)
    try:
        spec.check_tp(tp)
    except ValueError as error:
        raise BundleError(str(error)) from None
    return entry.read(folder, spec, tp, load_device(device or entry.device(folder)), created)
