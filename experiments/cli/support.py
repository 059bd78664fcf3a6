"""The command ``support``: which models run where, and how far off their op times are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sarathi_sim.experiments.cli.common import JsonOption, consoles, print_json, print_table

if TYPE_CHECKING:
    from sarathi_sim.experiments.run.support import Combination, Table


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
    from sarathi_sim.experiments.run import support as text
    from sarathi_sim.experiments.run.support import build, supported

    found = supported(model, device, stack, dtype)
    runs = [cell for cell in found if cell.memory is not None]
    if check:
        for cell in runs:
            build(cell)
        typer.echo(f"built: {len(runs)} cells, every op at every TP degree", err=True)
    if json:
        print_json({"cells": [cell.as_json() for cell in found]})
    elif markdown:
        typer.echo(text.page(found), nl=False)
    elif model is None and device is None:
        _print(text.by_device(found))
        headings, rows = text.matrix(found, dtype or "bf16")
        _print((tuple(name.replace("-", "\n") for name in headings), rows))
        consoles()[0].print(text.LEGEND, markup=False, highlight=False)
    else:
        _print(text.details(runs))
        if model and device:
            for cell in runs:
                _print_cell(cell)
        _print(text.refusals(found))


def _print(table: Table) -> None:
    headings, rows = table
    if rows:
        print_table(headings, (), rows)


def _print_cell(cell: Combination) -> None:
    """Every op's origin, and the memory of a GPU in the smallest layout."""
    assert cell.memory is not None
    (tp, pp), memory = cell.memory
    kernels = cell.kernels.name if cell.kernels else "calibrated device"
    rows = [(op, f"{o.half_width_pct:.1f}", o.mark) for op, o in cell.origins.items()]
    title = f"{kernels}, tp {tp}, pp {pp}"
    print_table(("op", "±%", "from"), (), rows, title=title)
    parts = [(name, f"{size / 1e9:.2f}", how) for name, size, how in memory.parts()]
    print_table(("a GPU's", "GB", "origin"), (), parts, title=title)
