"""The commands about the paper: its claims beside ours, and advice on the chunk size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sarathi_sim.experiments.cli.common import (
    WORKLOAD,
    DegreeOption,
    JsonOption,
    consoles,
    print_json,
    print_written,
)

if TYPE_CHECKING:
    from rich.table import Table

    from sarathi_sim.experiments.lab.paper.claims import ClaimResult


def reproduce(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Claims.  [default: all]")
    ] = None,
    json: JsonOption = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also write the results, figures and tables to this folder. Without IDs, also the "
            "readings of the pipeline experiment, over five seeds.",
        ),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="predicted or paper-calibrated.  [default: both]")
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="List the claims and how each is read.")
    ] = False,
) -> None:
    """Compute the paper's numbers, each beside the paper's own.

    \b
    Examples:
      sarathi-sim reproduce
      sarathi-sim reproduce tile_257 pd_peak_256_at --variant predicted
      sarathi-sim reproduce --out runs/paper
      sarathi-sim reproduce --json | jq .claims[0]
      sarathi-sim reproduce --list
    """
    from contextlib import nullcontext

    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.lab.paper.claims import counts_text, pick_claims
    from sarathi_sim.experiments.lab.paper.claims import reproduce as compute
    from sarathi_sim.experiments.lab.paper.variants import VARIANTS, Lab
    from sarathi_sim.experiments.results import PAPER_FORMAT, result_folder, write_summary
    from sarathi_sim.profiler.storage.strict import UserError, did_you_mean

    claims = pick_claims(ids or [])
    if listing:
        _print_readings([claim.id for claim in claims])
        return
    labs = [Lab(name) for name in VARIANTS]
    wanted = [lab for lab in labs if variant in (None, lab.variant)]
    if not wanted:
        raise UserError(
            f"--variant {variant}: no such variant{did_you_mean(str(variant), VARIANTS)}; "
            f"allowed: {', '.join(VARIANTS)}"
        )
    stdout, stderr = consoles()
    # The folder is made before the work: one may not be allowed to.
    folder = nullcontext() if out is None else result_folder(out, PAPER_FORMAT)
    with ProgressBar(stderr, enabled=True) as progress, folder as scratch:
        results = compute(claims, wanted, progress)
        content = {"claims": [result.row() for result in results]}
        if scratch is not None:
            from sarathi_sim.experiments.lab.paper.figures import write_gallery

            write_gallery(scratch, labs, None if ids else results, progress)
            write_summary(scratch, PAPER_FORMAT, content)
    if json:
        print_json(content)
    else:
        stdout.print(claims_table(results))
        for line in counts_text(results):
            typer.echo(line)
    print_written(out, err=json)


def advise(
    model: Annotated[str, typer.Option(help="A model of the profiles, or its Hub name.")],
    device: Annotated[str, typer.Option(help="A device of the profiles, or its YAML file.")],
    workload: Annotated[str, WORKLOAD],
    tp: DegreeOption = 1,
    batch: Annotated[
        int | None, typer.Option(min=2, help="Largest batch.  [default: what the memory holds]")
    ] = None,
    tbt_limit: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="MS", help="Longest time between tokens, in milliseconds."),
    ] = None,
    profiles: Annotated[
        Path | None, typer.Option(help="Folder of profile bundles.  [default: the shipped ones]")
    ] = None,
) -> None:
    """Advise on Sarathi's chunk size and batch cap.

    Simulates both, and prints the lengths that it read, the best choice, and what others lose.

    \b
    Examples:
      sarathi-sim advise --model llama-13b --device a6000 --workload 1K@14 --batch 18
      sarathi-sim advise --model llama-13b --device a6000 --workload "2K@?"
      sarathi-sim advise --model llama-3-8b --device a100-80g-sxm --workload 1024:256
    """
    from sarathi_sim.experiments.api import advise as find
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.run.machine import explain

    with ProgressBar(consoles()[1], enabled=True) as progress:
        advice = find(
            model,
            device,
            workload,
            tp=tp,
            batch=batch,
            tbt_limit_s=None if tbt_limit is None else 1e-3 * tbt_limit,
            profiles=profiles,
            progress=progress,
        )
    for line in explain(advice):
        typer.echo(line)


def claims_table(results: Sequence[ClaimResult]) -> Table:
    """One row a claim, the variants side by side."""
    from sarathi_sim.experiments.content import rich_table
    from sarathi_sim.experiments.lab.paper.claims import MARKS, marks

    variants = list(dict.fromkeys(result.variant for result in results))
    bounds = {"upper bound": "<= ", "lower bound": ">= "}
    rows = []
    for number in range(0, len(results), len(variants)):
        row = results[number : number + len(variants)]
        claim = row[0].claim
        cells = []
        for result in row:
            mark = "*" if result.fitted else ""
            good = "yes" if result.ok else "[bold]no[/bold]"
            cells += [f"{result.ours:.4g}{mark}", f"{result.ratio:.2f}", good]
        stated = f"{bounds.get(claim.kind, '')}{claim.paper:g}"
        rows.append([claim.id, marks(row), claim.section, claim.unit, stated, *cells])
    return rich_table(
        ("claim", "", "section", "unit"),
        ["paper", *(heading for name in variants for heading in (name, "ratio", ""))],
        rows,
        caption="*: fitted. Reproduced: within 15 %, or on the right side of a bound. " + MARKS,
    )


def _print_readings(ids: Sequence[str]) -> None:
    from sarathi_sim.experiments.lab.paper.claims import pick_claims

    for claim in pick_claims(ids):
        typer.echo(f"{claim.id} (section {claim.section}): {claim.metric}; {claim.setting}")
        typer.echo(f"    {claim.reading}")
