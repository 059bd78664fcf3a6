"""The commands about many runs: plan, sweep."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sarathi_sim.experiments.cli.common import (
    ConfigArgument,
    QuietOption,
    SetOption,
    consoles,
    print_notes,
    print_section,
    print_table,
    print_written,
)

if TYPE_CHECKING:
    from sarathi_sim.experiments.sweeps.backends import Backend
    from sarathi_sim.experiments.sweeps.execute import Report
    from sarathi_sim.experiments.sweeps.plan import SweepPlan
    from sarathi_sim.experiments.sweeps.store import Store

WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, max=4096, help="Worker processes.  [default: all processors]"),
]


Where = Literal["local", "dask"]
"""Where runs are simulated."""


def plan(
    config: ConfigArgument, assignments: SetOption = None, workers: WorkersOption = None
) -> None:
    """Check the runs of a sweep, and predict how long they take.

    \b
    Examples:
      sarathi-sim plan pd_sweep
      sarathi-sim plan my_sweep.yaml --set sweep.seeds=5
    """
    from sarathi_sim.experiments.sweeps.backends import processors
    from sarathi_sim.experiments.sweeps.execute import seconds_of_work
    from sarathi_sim.experiments.sweeps.plan import axes_rows

    planned = _planned(config, assignments, quiet=False)
    print_notes(planned.notes)
    print_table(("axis", "values", ""), (), axes_rows(planned))
    processes = workers or processors()
    work_s = seconds_of_work(planned)
    typer.echo(
        f"{len(planned.runs)} runs, predicted {_duration(work_s / processes)} "
        f"on {processes} worker{'s' if processes > 1 else ''}"
    )


def sweep(
    config: ConfigArgument,
    assignments: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the sweep.  [default: runs/NAME]")
    ] = None,
    workers: WorkersOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a sweep; finished runs are not repeated.")
    ] = False,
    backend: Annotated[Where, typer.Option(help="Local processes, or a Dask cluster.")] = "local",
    address: Annotated[
        str | None,
        typer.Option(help="Address of the Dask scheduler, such as tcp://127.0.0.1:8786."),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Simulate every run of a sweep.

    The result is a table with a row per run. If runs failed, or the sweep was interrupted,
    --resume completes it.

    \b
    Examples:
      sarathi-sim sweep pd_sweep --out runs/pd_sweep
      sarathi-sim sweep pd_sweep --out runs/pd_sweep --resume --workers 4
      sarathi-sim sweep pd_sweep --backend dask --address tcp://127.0.0.1:8786
    """
    from sarathi_sim.experiments.sweeps.execute import Report
    from sarathi_sim.experiments.sweeps.store import Store

    check_backend(backend, address, workers)
    planned = _planned(config, assignments, quiet)
    folder = out or Path("runs") / planned.name
    store = Store(folder)
    report = Report(len({run.key for run in planned.runs}))
    where = backend_at(backend, address, workers)
    try:
        store.open(resume)
        with store.locked():
            _execute(planned, store, where, report, quiet)
    except BaseException:
        if report.wall_s:  # it had begun
            typer.echo(
                f"stopped: {report.finished} of {report.total} runs are finished; complete the "
                f"sweep with the same command and --resume",
                err=True,
            )
        raise
    finally:
        where.close()
    _report(planned, store, report, where.workers, quiet)
    if report.failures:
        raise typer.Exit(1)


def _planned(config: str, assignments: list[str] | None, quiet: bool) -> SweepPlan:
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.sweeps.plan import plan_sweep

    with ProgressBar(consoles()[1], enabled=not quiet) as progress:
        return plan_sweep(config, assignments or [], progress)


def check_backend(where: Where, address: str | None, workers: int | None) -> None:
    """Raises UserError for options that do not go together."""
    from sarathi_sim.profiler.storage.strict import UserError

    if (where == "dask") != (address is not None):
        raise UserError("--backend dask and --address: one needs the other")
    if where == "dask" and workers is not None:
        raise UserError(
            f"--workers {workers}: not allowed with --backend dask: the cluster has its own workers"
        )


def backend_at(where: Where, address: str | None, workers: int | None) -> Backend:
    """The backend that checked options ask for."""
    if where == "dask":
        from sarathi_sim.experiments.sweeps.backends import DaskWorkers

        return DaskWorkers(str(address))
    from sarathi_sim.experiments.sweeps.backends import local_backend

    return local_backend(workers)


def _execute(planned: SweepPlan, store: Store, where: Backend, report: Report, quiet: bool) -> None:
    from sarathi_sim.experiments.cli.common import ProgressBar
    from sarathi_sim.experiments.sweeps.execute import execute

    with ProgressBar(consoles()[1], enabled=not quiet) as progress:
        execute(planned, store, where, progress, report, partial(typer.echo, err=True))


def _report(planned: SweepPlan, store: Store, report: Report, workers: int, quiet: bool) -> None:
    from sarathi_sim.experiments.sweeps.store import RESULTS
    from sarathi_sim.experiments.sweeps.sweep_answer import read_answer

    shown = list(report.failures.items())[:5]
    for key, error in shown:
        typer.echo(f"failed: run {key}: {error}", err=True)
    if len(report.failures) > len(shown):
        typer.echo(f"... and {len(report.failures) - len(shown)} more", err=True)
    if report.failures:
        typer.echo(
            f"{len(report.failures)} of {report.total} runs failed; their tracebacks are in "
            f"{store.folder / 'failed'}; --resume tries them again",
            err=True,
        )
    if quiet:
        return
    if report.finished:
        print_section(read_answer(store.folder)[1], rest=RESULTS)
    typer.echo(_outcome(report, workers))
    print_written(store.folder)


def _duration(seconds: float) -> str:
    """Seconds as text with a suitable unit."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _outcome(report: Report, workers: int) -> str:
    """One line: finished runs, time, and the workers' share of time in runs."""
    ran = report.finished - report.earlier
    parts = [f"{report.finished} of {report.total} runs finished"]
    if report.earlier:
        parts.append(f"{report.earlier} of them earlier")
    if ran:
        parts.append(
            f"{_duration(report.wall_s)} on {workers} worker{'s' if workers > 1 else ''}, "
            f"{100 * report.busy:.0f} % of it in runs"
        )
    if report.lost_workers:
        parts.append(f"{report.lost_workers} bundles were sent again after their worker died")
    return ", ".join(parts)
