"""The commands about models, devices, policies and profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sarathi_sim.experiments.cli.common import (
    DatasetsOption,
    JsonOption,
    consoles,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pandas as pd


def models(json: JsonOption = False) -> None:
    """List the models that ship with the package.

    \b
    Examples:
      sarathi-sim models
      sarathi-sim models --json | jq '.["llama-3.1-8b"].num_kv_heads'
    """
    from dataclasses import asdict

    from sarathi_sim.profiler.facts.model import list_models, load_model

    specs = {name: load_model(name) for name in list_models()}
    if json:
        counted = ("num_parameters", "active_parameters")
        print_json(
            {
                n: {**asdict(m), **{key: getattr(m, key) for key in counted}}
                for n, m in specs.items()
            }
        )
        return
    columns = {
        "10^9 parameters": lambda spec: f"{spec.num_parameters / 1e9:.2f}",
        "active": lambda spec: f"{spec.active_parameters / 1e9:.2f}",
        "weights": lambda spec: spec.moe_dtype or spec.dtype,
        "layers": lambda spec: str(spec.num_layers),
        "hidden": lambda spec: str(spec.hidden_size),
        "heads/KV": lambda spec: f"{spec.num_heads}/{spec.num_kv_heads}",
        "context": lambda spec: str(spec.max_position_embeddings),
        "KV KiB/token": lambda spec: f"{spec.kv_bytes_per_token() / 1024:.0f}",
    }
    _print_specs("model", specs, columns)


def devices(json: JsonOption = False) -> None:
    """List the devices that ship with the package.

    \b
    Examples:
      sarathi-sim devices
      sarathi-sim devices --json | jq '.["h100-80g-sxm"].stacks'
    """
    from dataclasses import asdict, replace

    from sarathi_sim.profiler.facts.device import list_devices, load_device
    from sarathi_sim.profiler.kernels.stack_file import stacks_on

    specs = {name: load_device(name) for name in list_devices()}
    if json:
        print_json(
            {
                name: {
                    **asdict(replace(spec, fitted=None)),
                    "fitted": bool(spec.fitted),
                    "stacks": stacks_on(name),
                }
                for name, spec in specs.items()
            }
        )
        return
    columns = {
        "GB": lambda spec: f"{spec.memory_bytes / 1e9:.0f}",
        "peak TFLOP/s": lambda spec: f"{spec.peak_flops / 1e12:.0f}",
        "GB/s": lambda spec: f"{spec.memory_bandwidth / 1e9:.0f}",
        "GPUs per node": lambda spec: str(spec.gpus_per_node),
        "op times": lambda spec: "calibrated" if spec.fitted else "specifications only",
        "stacks": lambda spec: ", ".join(stacks_on(spec.name)) or "-",
    }
    _print_specs("device", specs, columns)


def _print_specs(
    what: str, specs: Mapping[str, Any], columns: Mapping[str, Callable[[Any], str]]
) -> None:
    """A row for each; a terminal that is too narrow for all columns has the first ones."""
    from sarathi_sim.experiments.content import rich_table

    rows = [(name, *(cell(spec) for cell in columns.values())) for name, spec in specs.items()]
    headings, console = (what, *columns), consoles()[0]
    cells = list(zip(headings, *rows, strict=True))
    # No name and no number is broken: a column is as wide as its longest word.
    widths = [max(len(word) for cell in column for word in cell.split()) for column in cells]
    shown = len(headings)
    while shown > 1 and sum(widths[:shown]) + 3 * shown + 1 > console.width:
        shown -= 1
    left = console.width - sum(widths[:shown]) - 3 * shown - 1
    left_out = f"See --json for {', '.join(headings[shown:])}" if shown < len(headings) else None
    table = rich_table(headings[:shown], (), [row[:shown] for row in rows], caption=left_out)
    for column, width, each in zip(table.columns, widths, cells, strict=False):
        more = min(left, max(map(len, each)) - width)
        column.width, left = width + more, left - more
    console.print(table, markup=False, highlight=False)


def policies() -> None:
    """List the scheduling policies and their keys.

    These are the keys of a configuration's `policy` section. A policy of your own comes from a
    file: `policy: {file: mine.py, name: ...}`.

    \b
    Examples:
      sarathi-sim policies
    """
    from sarathi_sim.experiments.config.policy import POLICIES

    rows = []
    for name, policy in POLICIES.items():
        fields = policy.model_fields
        keys = [
            f"{key}={field.default}{_others(field.annotation, field.default)}"
            for key, field in fields.items()
            if key != "name"
        ]
        rows.append((name, ", ".join(keys) or "-", " ".join((policy.__doc__ or "").split())))
    print_table(("name", "keys and defaults", "what it does"), (), rows)


def _others(annotation: object, default: object) -> str:
    """The other values a key may have, where they can be listed."""
    from typing import Literal, get_args, get_origin

    if get_origin(annotation) is not Literal:
        return ""
    others = [str(value) for value in get_args(annotation) if value != default]
    return f" (or {', '.join(others)})" if others else ""


def calibrate(
    device: Annotated[str | None, typer.Option(help="One device.  [default: all]")] = None,
    stack: Annotated[
        str | None,
        typer.Option(help="Fit the kernels of vllm, sglang or trtllm instead of device models."),
    ] = None,
    datasets: DatasetsOption = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print the stored errors instead of fitting again.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Store the fit in the shipped device files.")
    ] = False,
) -> None:
    """Fit device models to public measurements (needs them).

    Prints the error on rows held out of the fit. data/README.md says where the files come from.
    --report needs no files.

    \b
    Examples:
      sarathi-sim calibrate --report
      sarathi-sim calibrate --device a6000 --datasets measurements
      SARATHI_SIM_DATASETS=measurements sarathi-sim calibrate --write
      sarathi-sim calibrate --device h100-80g-sxm --stack vllm --datasets measurements
    """
    from sarathi_sim.experiments.config.errors import ConfigError
    from sarathi_sim.profiler.physics import calibrate as fitting
    from sarathi_sim.profiler.physics.studies import STUDIES
    from sarathi_sim.profiler.storage.files import public_datasets

    if report and write:
        raise ConfigError("--write: does not go with --report, which fits nothing")
    if stack is not None:
        _calibrate_stack(device, stack, None if report else public_datasets(datasets), write)
        return
    if report:
        _print_errors(fitting.report_from_yaml(device), fitting.structure_from_yaml(device))
        return
    folder = public_datasets(datasets)
    _, stderr = consoles()
    for name in [device] if device else list(STUDIES):
        result = fitting.calibrate(
            name, folder, lambda step: stderr.print(step, style="dim", highlight=False)
        )
        _print_errors(result.report(), result.structure())
        if write:
            for path in result.write():
                typer.echo(f"written: {path}")


def _calibrate_stack(device: str | None, stack: str, datasets: Path | None, write: bool) -> None:
    """Fit a stack's kernels on one device or all; without ``datasets`` print what is stored."""
    from sarathi_sim.experiments.cli.accuracy import print_scores
    from sarathi_sim.experiments.figures.kernel_errors import scores_of
    from sarathi_sim.profiler.kernels.stack_file import load_stack, write_stack
    from sarathi_sim.profiler.kernels.stack_fit import check_fitted, fit_stack
    from sarathi_sim.profiler.storage.files import data_dir

    _, stderr = consoles()
    for name in check_fitted(device, stack):
        if datasets is None:
            print_scores(list(scores_of(load_stack(name, stack)[0])))
            continue
        spec, arrays = fit_stack(
            datasets, name, stack, lambda step: stderr.print(step, style="dim", highlight=False)
        )
        print_scores(list(scores_of(spec)))
        for path in write_stack(spec, arrays, data_dir() / "kernels") if write else ():
            typer.echo(f"written: {path}")


_HEADINGS = {
    "median_pct": "median",
    "p95_pct": "p95",
    "worst_pct": "worst",
    "roofline_median_pct": "roofline alone: median",
    "roofline_p95_pct": "p95",
    "roofline_worst_pct": "worst",
    "hold_out": "held out",
}


def _print_errors(report: pd.DataFrame, structure: pd.DataFrame) -> None:
    # The sources take a paragraph each: see the device file and data/README.md.
    for device, errors in report.groupby("device", sort=False):
        typer.echo(f"{device}: error of predicted times on rows held out of the fit, in percent")
        _print_frame(errors.drop(columns=["device", "source"]).rename(columns=_HEADINGS))
        typer.echo(f"{device}: by range, at tile edges, and on other sources' rows")
        where = structure[structure["device"] == device]
        _print_frame(where.drop(columns="device").rename(columns=_HEADINGS))


def _print_frame(frame: pd.DataFrame) -> None:
    rows = [
        tuple(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row)
        for row in frame.itertuples(index=False)
    ]
    print_table([str(column) for column in frame.columns], (), rows)
