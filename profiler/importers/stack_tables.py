"""aiconfigurator's parquet tables: a stack's kernels, fitted and made into a bundle at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sarathi_sim.profiler.bundle.schema import Bundle, BundleError
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.model import load_model
from sarathi_sim.profiler.kernels.stack_bundle import make_stack_bundle
from sarathi_sim.profiler.kernels.stack_fit import check_fitted, fit_stack
from sarathi_sim.profiler.public.kernel_tables import FORMS, SYSTEMS
from sarathi_sim.profiler.storage.paths import WHERE
from sarathi_sim.profiler.storage.strict import SpecError, did_you_mean


def import_stack(folder: Path, model: str | Path, tp: int, device: str, kernels: Kernels) -> Bundle:
    """The bundle of one ``tp`` rank of ``model`` from the tables of a stack on ``device``.

    Raises SpecError for a device or stack without tables, BundleError for a table that cannot be
    used, FileNotFoundError for a missing folder, ValueError for a tp that does not fit the model.
    """
    if device not in SYSTEMS:
        raise SpecError(
            f"aiconfigurator has no tables of device {device!r}{did_you_mean(device, SYSTEMS)}; "
            f"allowed: {', '.join(SYSTEMS)}"
        )
    check_fitted(device, kernels.stack)
    reads = f"aiconfigurator reads {FORMS}; {WHERE}"
    try:
        fitted = fit_stack(folder, device, kernels.stack)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; {reads}") from None
    if not fitted[0].having("gemm"):
        raise BundleError(f"{folder}: no GEMMs of {kernels.stack} on {device}; {reads}")
    bundle = make_stack_bundle(device, load_model(model), tp, kernels, fitted=fitted)
    hardware = f"{device}, kernels of {kernels.name}"
    meta = dataclasses.replace(
        bundle.meta,
        source="imported",
        generator="sarathi-sim import aiconfigurator",
        environment={**bundle.meta.environment, "hardware": hardware},
    )
    return dataclasses.replace(bundle, meta=meta)
