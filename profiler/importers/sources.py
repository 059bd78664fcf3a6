"""The sources that can be imported, by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sarathi_sim.profiler.bundle.schema import Bundle, BundleError
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.importers.aiconfigurator import import_aiconfigurator
from sarathi_sim.profiler.importers.llmservingsim import FORMS, import_llmservingsim, measured_on
from sarathi_sim.profiler.importers.vidur import import_vidur
from sarathi_sim.profiler.storage.files import WHERE
from sarathi_sim.profiler.storage.strict import did_you_mean

Importer = Callable[[Path, ModelSpec, int, DeviceSpec], Bundle]
"""Makes the bundle of a model at a TP degree on a device from a source's folder.

Raises BundleError for requests that the source cannot meet.
"""


@dataclass(frozen=True)
class Publisher:
    """A source: its reader, the default device of a folder, and its files."""

    read: Importer
    usual_device: Callable[[Path], str]
    forms: str


SOURCES = {
    "vidur": Publisher(
        import_vidur,
        lambda _: "a100-80g-sxm",
        "Vidur's CSVs: mlp_{a100,a40}_MODEL.csv, attention_a100_CodeLlama-34b_tp2.csv, all_reduce_*"
        " and p2p_*",
    ),
    "aiconfigurator": Publisher(
        import_aiconfigurator,
        lambda _: "a100-80g-sxm",
        "gemm_bf16.csv, attention_{prefill,decode}_bf16.csv and nccl_collectives.csv of an A100",
    ),
    "llmservingsim": Publisher(
        import_llmservingsim,
        measured_on,
        f"LLMServingSim's {FORMS}",
    ),
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
    needed file is not there. Both say which files the source reads.
    """
    if source not in SOURCES:
        raise BundleError(
            f"unknown source {source!r}{did_you_mean(source, SOURCES)}; "
            f"allowed: {', '.join(f'{name} ({each.forms})' for name, each in SOURCES.items())}"
        )
    found = SOURCES[source]
    reads = f"{source} reads {found.forms}"
    if not folder.is_dir():
        raise BundleError(f"{folder}: no such folder; {reads}; {WHERE}")
    spec = load_model(model)
    try:
        spec.check_tp(tp)
        spec.check_plain(f"the importer of {source}")
    except ValueError as error:
        raise BundleError(str(error)) from None
    try:
        return found.read(folder, spec, tp, load_device(device or found.usual_device(folder)))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; {reads}") from None
