"""The commands about models, devices, policies, workloads, and which models run where."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sarathi_sim.experiments.cli.common import (
    DatasetsOption,
    JsonOption,
    SetOption,
    WorkloadOption,
    consoles,
    print_json,
    print_section,
    print_table,
    print_written,
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
        "op times": lambda spec: ", ".join(
            way
            for way, there in {"calibrated": spec.fitted, "by stack": stacks_on(spec.name)}.items()
            if there
        ),
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
    tables: Annotated[
        str | None,
        typer.Option(
            help="Of a stack, fit these only: gemm,attention,moe,all_reduce,all_to_all,wide."
        ),
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
    from sarathi_sim.experiments.lab.fit import devices as fitting
    from sarathi_sim.profiler.storage.files import public_datasets
    from sarathi_sim.profiler.storage.strict import UserError

    if report and write:
        raise UserError("--write: does not go with --report, which fits nothing")
    if stack is not None:
        folder = None if report else public_datasets(datasets)
        _calibrate_stack(device, stack, folder, write, tables)
        return
    if report:
        for name, fitted in fitting.fitted_devices(device).items():
            _print_errors(name, fitting.report(name, fitted), fitting.structure(name, fitted))
        return
    folder = public_datasets(datasets)
    _, stderr = consoles()
    for name in [device] if device else list(fitting.STUDIES):
        result = fitting.calibrate(
            name, folder, lambda step: stderr.print(step, style="dim", highlight=False)
        )
        errors = fitting.report(name, result.fitted), fitting.structure(name, result.fitted)
        _print_errors(name, *errors)
        if write:
            for path in result.write():
                typer.echo(f"written: {path}")


def _calibrate_stack(
    device: str | None, stack: str, datasets: Path | None, write: bool, tables: str | None
) -> None:
    """Fit a stack's kernels on one device or all; without ``datasets`` print what is stored."""
    from sarathi_sim.experiments.cli.measured import print_scores
    from sarathi_sim.experiments.lab.fit.accuracy import scores_of
    from sarathi_sim.experiments.lab.fit.kernels import FAMILIES, check_fitted, fit_stack
    from sarathi_sim.profiler.kernels.stack_file import load_stack, write_stack
    from sarathi_sim.profiler.storage.files import data_dir
    from sarathi_sim.profiler.storage.strict import UserError

    _, stderr = consoles()
    families = (tables or ",".join(FAMILIES)).split(",")
    for name in families:
        if name not in FAMILIES:
            raise UserError(f"--tables {name}: must be one of {', '.join(FAMILIES)}")
    for name in check_fitted(device, stack):
        if datasets is None:
            print_scores(list(scores_of(load_stack(name, stack)[0])))
            continue
        spec, arrays = fit_stack(
            datasets,
            name,
            stack,
            lambda step: stderr.print(step, style="dim", highlight=False),
            families=families,
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


def _print_errors(device: str, report: pd.DataFrame, structure: pd.DataFrame) -> None:
    # The sources take a paragraph each: see the device file and data/README.md.
    typer.echo(f"{device}: error of predicted times on rows held out of the fit, in percent")
    _print_frame(report.drop(columns=["device", "source"]).rename(columns=_HEADINGS))
    typer.echo(f"{device}: by range, at tile edges, and on other sources' rows")
    _print_frame(structure.drop(columns="device").rename(columns=_HEADINGS))


def _print_frame(frame: pd.DataFrame) -> None:
    rows = [
        tuple(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row)
        for row in frame.itertuples(index=False)
    ]
    print_table([str(column) for column in frame.columns], (), rows)


def support(
    model: Annotated[
        str | None, typer.Option(help="A shipped model, its Hub name, or a config.json.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A shipped device, or a device YAML.")] = None,
    stack: Annotated[
        str | None, typer.Option(help="Of this stack only: vllm, sglang, trtllm.  [default: all]")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of these weights only.  [default: all; of the matrix, bf16]")
    ] = None,
    json: JsonOption = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/support.md on stdout.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Time every op of every cell that is said to run.")
    ] = False,
) -> None:
    """Say which model runs on which device.

    For each stack and number format: from measured, interpolated or modelled op times, with their
    error; the smallest layout that holds the model; what is refused, and why. With --model and
    --device, also the origin of every op, and the parts of a GPU's memory.

    \b
    Examples:
      sarathi-sim support
      sarathi-sim support --dtype fp8 --stack sglang
      sarathi-sim support --model llama-3.3-70b --device h100-80g-sxm
      sarathi-sim support --device l40s --json | jq '.cells[] | select(.runs)'
    """
    from sarathi_sim.experiments.run.support import build, page, support_answer, supported

    found = supported(model, device, stack, dtype)
    if check:
        runs = [cell for cell in found if cell.memory is not None]
        for cell in runs:
            build(cell)
        typer.echo(f"built: {len(runs)} cells, every op at every TP degree", err=True)
    if json:
        print_json({"cells": [cell.as_json() for cell in found]})
    elif markdown:
        typer.echo(page(found), nl=False)
    else:
        print_section(support_answer(found, model, device, dtype))


def workload(
    what: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="A trace (CSV, JSON), or a configuration."),
    ] = None,
    workload: WorkloadOption = None,
    assignments: SetOption = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MEANING=NAME",
            help="A column of a trace with a name of its own: arrival, prompt, output, user, "
            "session or turn. May be repeated.",
        ),
    ] = None,
    json: JsonOption = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write the numbers and a figure to this folder.")
    ] = None,
) -> None:
    """Say what is in a workload.

    Prints lengths, rates, burstiness and how much of the prompts is shared. FILE is a trace as
    `workload.lengths.path` takes it, or a configuration, of which the requests are drawn. In its
    place --workload takes what it takes elsewhere.

    \b
    Examples:
      sarathi-sim workload trace.csv
      sarathi-sim workload log.jsonl --column prompt=tokens_in --column output=tokens_out
      sarathi-sim workload failures.csv --set workload.lengths.skip_empty=true
      sarathi-sim workload shared_prefixes --out runs/workload
      sarathi-sim workload --workload 1024:256~0.5 --json
    """
    from sarathi_sim.experiments.run.traffic import describe, workload_answer
    from sarathi_sim.profiler.storage.strict import UserError

    if (what is None) == (workload is None):
        raise UserError("FILE and --workload: give one of them")
    columns = dict(text.partition("=")[::2] for text in column or [])
    described = describe(str(what or workload), assignments or [], columns, out)
    if json:
        print_json(described)
    print_section(workload_answer(described), err=json)
    print_written(out, err=json)
