"""The sources that can be imported, by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from profiler.bundle.schema import Bundle, BundleError
from profiler.facts.device import DeviceSpec, load_device
from profiler.facts.model import ModelSpec, load_model
from profiler.importers.aiconfigurator import import_aiconfigurator
from profiler.importers.llmservingsim import import_llmservingsim, measured_on
from profiler.importers.vidur import import_vidur
from profiler.storage.paths import WHERE
from profiler.storage.strict import did_you_mean

Importer = Callable[[Path, ModelSpec, int, DeviceSpec], Bundle]
"""Makes the bundle of a model at a TP degree on a device from a source's folder.

Raises BundleError for what cannot be had from it.
"""

#: Readers, and the device that a folder is taken to be of where none is named.
SOURCES: dict[str, tuple[Importer, Callable[[Path], str]]] = {
    "vidur": (import_vidur, lambda _: "a100-80g-sxm"),
    "aiconfigurator": (import_aiconfigurator, lambda _: "a100-80g-sxm"),
    "llmservingsim": (import_llmservingsim, measured_on),
}


def import_bundle(
    source: str,
    folder: Path,
    model: str | Path,
    tp: int,
    device: str | None = None,
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
    (read, usual_device), spec = SOURCES[source], load_model(model)
    try:
        spec.check_tp(tp)
        spec.check_plain(f"the importer of {source}")
    except ValueError as error:
        raise BundleError(str(error)) from None
    return read(folder, spec, tp, load_device(device or usual_device(folder)))
