"""The library: what a script or a notebook calls, as ``import sarathi_sim as sim`` gives it.

docs/library.md has an example of each. Names of this module stay; those of other modules may move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sarathi_sim.experiments.config.loading import Assignments, Config, load_experiment
from sarathi_sim.experiments.config.loading import Experiment as Experiment
from sarathi_sim.experiments.results import Tables as Tables
from sarathi_sim.experiments.results import read_tables
from sarathi_sim.experiments.run.experiment import ExperimentResult as ExperimentResult
from sarathi_sim.experiments.run.experiment import ScenarioRun as ScenarioRun
from sarathi_sim.experiments.run.experiment import run_experiment, simulate_all
from sarathi_sim.experiments.sweeps.backends import local_backend
from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.strict import UserError as UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from sarathi_sim.experiments.config.deployment import Deployment
    from sarathi_sim.experiments.run.machine import Advice
    from sarathi_sim.experiments.sweeps.plan import SweepPlan


Folder = str | Path
Shown = ExperimentResult | Mapping[str, Tables]
"""The input of a plot: the outcome of :func:`simulate`, or the tables of :func:`read`."""


def load(config: Config, changes: Assignments = ()) -> Experiment:
    """Read a configuration: a file, the name of a shipped one, or a mapping with a file's content.

    ``changes`` are values by key path, ``{"cluster.pp": 4}``. In a mapping, a policy may also be an
    object or a class of the session. Raises UserError, a line per mistake.
    """
    return load_experiment(config, changes)


def simulate(
    config: Config | Experiment,
    changes: Assignments = (),
    *,
    out: Folder | None = None,
    figures: bool = False,
    progress: Progress = silent,
) -> ExperimentResult:
    """Simulate every scenario of a configuration.

    With ``out``, write the folder that ``sarathi-sim run`` writes, with ``figures`` if wanted.
    Raises UserError for a scenario that cannot run, and if ``out`` holds foreign files.
    """
    experiment = config if isinstance(config, Experiment) else load(config, changes)
    if isinstance(config, Experiment) and changes:
        raise UserError("changes: give them to load(), which has made this experiment")
    if out is None:
        return simulate_all(experiment, progress)
    return run_experiment(experiment, Path(out), figures=figures, progress=progress)


def read(folder: Folder) -> dict[str, Tables]:
    """The tables of every scenario of a result. Raises UserError where it is not one."""
    return read_tables(Path(folder))


def sweep(
    config: Config,
    changes: Assignments = (),
    *,
    out: Folder | None = None,
    workers: int = 1,
    resume: bool = False,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Simulate every run of a configuration with a ``sweep`` section: a row per run, with the swept
    values and the numbers of its summary, such as ``ttft_s.p99``.

    ``out`` keeps the folder that ``sarathi-sim sweep`` writes, to be resumed. More than one of
    ``workers`` are processes. Raises UserError for what cannot run, and if runs failed.
    """
    import pandas as pd

    from sarathi_sim.experiments.sweeps.execute import execute
    from sarathi_sim.experiments.sweeps.plan import plan_sweep
    from sarathi_sim.experiments.sweeps.store import RESULTS, Store

    plan = plan_sweep(config, changes, progress)
    with ExitStack() as stack:
        folder = _folder(out, stack)
        store = Store(folder)
        store.open(resume)
        stack.enter_context(store.locked())
        report = execute(plan, store, local_backend(workers), progress)
        if report.failures:
            key, error = next(iter(report.failures.items()))
            more = f" (and {len(report.failures) - 1} more)" if len(report.failures) > 1 else ""
            raise UserError(f"run {key} failed: {error}{more}")
        return pd.read_parquet(folder / RESULTS)


def _folder(out: Folder | None, stack: ExitStack) -> Path:
    """The folder to write to; without one, a new one that goes with the stack."""
    return Path(out or stack.enter_context(TemporaryDirectory(prefix="sarathi-sim-")))


def describe_workload(
    what: Config,
    changes: Assignments = (),
    *,
    columns: Mapping[str, str] | None = None,
    out: Folder | None = None,
) -> dict[str, dict[str, Any]]:
    """Say what is in a workload: what ``workload --json`` prints, by scenario.

    Lengths in tokens, rates in requests a second, burstiness, and the share of the prompts that is
    shared (docs/workloads.md). ``what`` is a trace, a configuration, or lengths in a word
    (``"1024:256"``); ``columns`` are a trace's own column names, ``{"prompt": "tokens_in"}``.
    ``out`` also gets a figure. Raises UserError for what cannot be read.
    """
    from sarathi_sim.experiments.run.traffic import describe

    return describe(what, changes, columns or {}, None if out is None else Path(out))


def check(config: Config, changes: Assignments = ()) -> dict[str, Deployment]:
    """Check every scenario with its model, device, profiles and memory; nothing is simulated.

    What would run, by scenario: with every default filled in, and notes on it. Raises UserError.
    """
    from sarathi_sim.experiments.run.experiment import deploy_all

    return deploy_all(load(config, changes))


def plan(config: Config, changes: Assignments = (), *, progress: Progress = silent) -> SweepPlan:
    """Check the runs of a configuration with a ``sweep`` section, and list them.

    Raises UserError, a line per mistake.
    """
    from sarathi_sim.experiments.sweeps.plan import plan_sweep

    return plan_sweep(config, changes, progress)


def compare(a: Folder, b: Folder, *, progress: Progress = silent) -> dict[str, Any]:
    """Which parts of the time make two results differ, in seconds: what ``compare --json`` prints.

    Both are simulated again. Raises UserError where a folder is no result of one scenario.
    """
    from sarathi_sim.experiments.run.compare import compare as compared

    return compared(Path(a), Path(b), progress)


def find_capacity(
    config: Config,
    changes: Assignments = (),
    *,
    workload: str | None = None,
    out: Folder | None = None,
    workers: int = 1,
    bands: bool = True,
    prices: str | None = None,
    refine: int = 0,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Find the highest load under which the SLO of a ``capacity`` section holds: a row per
    deployment, with its ``capacity``, what breaks first, and what a million output tokens cost.

    ``workload`` gives lengths in place of its own, as ``"1024:256"`` or another text that
    ``--workload`` takes (docs/workloads.md). ``out`` keeps the folder that ``sarathi-sim capacity``
    writes; the same call goes on from it.
    ``bands`` also searches under errors of the op times. ``prices`` is a YAML (docs/capacity.md)
    in place of the shipped assumptions. ``refine`` times, deployments half-way between the best and
    its neighbours are searched, too. Raises UserError for what cannot run.
    """
    from sarathi_sim.experiments.capacity.answer import (
        answered,
        load_prices,
        read_question,
        result_files,
    )
    from sarathi_sim.experiments.capacity.probing import CAPACITY_FORMAT, laboratory, write_result
    from sarathi_sim.experiments.capacity.written import capacities
    from sarathi_sim.experiments.config.loading import refuse_of_session

    draft, section, options = read_question(config, changes, workload)
    costs = load_prices(prices)
    for option in options:
        refuse_of_session(option.scenario, draft.source)
    with ExitStack() as stack:
        folder = _folder(out, stack)
        backend = local_backend(workers)
        lab = stack.enter_context(laboratory(folder, CAPACITY_FORMAT, section, backend, progress))
        content = answered(lab, draft, options, bands, costs, refine)
        if out is not None:
            write_result(folder, CAPACITY_FORMAT, result_files(draft, section, content))
    return capacities(content["deployments"])


def recommend(
    model: str,
    device: str | Sequence[str],
    slo: str,
    *,
    gpus: int | None = None,
    rate: float | None = None,
    workload: str = "capacity_llama3_70b",
    max_length: int | None = None,
    stack: str | Sequence[str] | None = None,
    dtype: str | Sequence[str] | None = None,
    budgets: Sequence[int] = (),
    seqs: Sequence[int] = (),
    tolerance: float = 0.05,
    rejected: float = 0.0,
    pools: bool = False,
    speculation: str | None = None,
    drafts: Sequence[int] = (),
    refine: int = 0,
    prices: str | None = None,
    out: Folder | None = None,
    workers: int = 1,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Find the deployment that carries most on ``gpus``, or costs least for ``rate`` requests a
    second, under an SLO: what ``recommend --json`` prints, with the engine's ``command``.

    ``budgets``, ``seqs`` and ``drafts`` are the token budgets, sequence limits and draft lengths to
    try; the other options are those of the command. ``out`` keeps the folder that it writes. Raises
    UserError where no deployment keeps the SLO, and for what cannot run.
    """
    from sarathi_sim.experiments.capacity.answer import load_prices
    from sarathi_sim.experiments.capacity.options import wanted_of
    from sarathi_sim.experiments.capacity.probing import RECOMMEND_FORMAT, laboratory, write_result
    from sarathi_sim.experiments.capacity.recommend import recommend_files, recommended

    wanted = wanted_of(
        model,
        _with_commas(device) or "",
        slo,
        gpus,
        rate,
        workload,
        max_length,
        _with_commas(stack),
        _with_commas(dtype),
        _with_commas(budgets),
        _with_commas(seqs),
        tolerance,
        rejected,
        pools,
        speculation,
        _with_commas(drafts),
    )
    costs = load_prices(prices)
    with ExitStack() as opened:
        folder, section = _folder(out, opened), wanted.section
        backend = local_backend(workers)
        lab = opened.enter_context(laboratory(folder, RECOMMEND_FORMAT, section, backend, progress))
        content = recommended(lab, wanted, costs, lambda text: None, refine)
        if out is not None:
            write_result(folder, RECOMMEND_FORMAT, recommend_files(wanted, content))
    return content


def _with_commas(some: str | Sequence[object] | None) -> str | None:
    return some if isinstance(some, str) else ",".join(map(str, some or ())) or None


def find_sensitivity(
    config: Config,
    changes: Assignments = (),
    *,
    by: float = 0.1,
    only: Sequence[str] = (),
    metrics: Sequence[str] = (),
    replications: int = 3,
    out: Folder | None = None,
    workers: int = 1,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Find what moves the capacity (or, without a ``capacity`` section, ``metrics`` of a run) most:
    a row per deployment, measure and factor, with its ``elasticity``, percent for a percent.

    Each op's time, link speed, host time, lengths and burstiness (``only``: some of them) are a
    part ``by`` less, and more. ``out`` keeps the folder that ``sarathi-sim sensitivity`` writes.
    Raises UserError for what cannot run.
    """
    from sarathi_sim.experiments.capacity.probing import (
        SENSITIVITY_FORMAT,
        laboratory,
        write_result,
    )
    from sarathi_sim.experiments.capacity.sensitivity import (
        read_sensitivity,
        sensitivity,
        sensitivity_files,
        table_of,
    )

    asked = read_sensitivity(
        config, changes, by=by, replications=replications, only=only, metrics=metrics
    )
    with ExitStack() as stack:
        folder, kind = _folder(out, stack), SENSITIVITY_FORMAT
        probes = laboratory(folder, kind, asked.section, local_backend(workers), progress)
        content = sensitivity(stack.enter_context(probes), asked)
        if out is not None:
            write_result(folder, SENSITIVITY_FORMAT, sensitivity_files(asked, content))
    return table_of(content)


def advise(
    model: str,
    device: str,
    workload: str,
    *,
    tp: int = 1,
    batch: int | None = None,
    tbt_limit_s: float | None = None,
    profiles: Folder | None = None,
    progress: Progress = silent,
) -> Advice:
    """The best chunk size and batch cap of Sarathi for a workload on one tensor-parallel group.

    ``batch`` bounds the batch (None: by the memory), ``tbt_limit_s`` the time between tokens (P99).
    Raises UserError for a model without a bundle in ``profiles`` (None: the shipped ones), a
    batch that does not fit and a limit that nothing meets.
    """
    from sarathi_sim.experiments.run.machine import Machine
    from sarathi_sim.experiments.run.machine import advise as find
    from sarathi_sim.experiments.run.traffic import demand_of
    from sarathi_sim.profiler.bundle.schema import find_bundle, list_bundles, load_bundle
    from sarathi_sim.profiler.facts.device import load_device
    from sarathi_sim.profiler.facts.model import load_model
    from sarathi_sim.profiler.kernels.op_source import op_source
    from sarathi_sim.simulator.op_times.modelled import modelled_times
    from sarathi_sim.simulator.op_times.regression import bundle_times

    demand = demand_of(workload)
    gpu = load_device(device)
    if profiles is None:
        source = op_source(gpu, load_model(model), tp)
    else:
        if model not in (name for _, name, _ in list_bundles(Path(profiles))):
            model = load_model(model).name
        source = find_bundle(Path(profiles), gpu.name, model, tp)
    ops = bundle_times(load_bundle(source)) if isinstance(source, Path) else modelled_times(source)
    return find(
        Machine(ops, device),
        demand,
        batch_cap=batch,
        tbt_limit_s=tbt_limit_s,
        progress=lambda done, total: progress("simulations", done, total),
    )


def support(
    model: str | None = None,
    device: str | None = None,
    *,
    stack: str | None = None,
    dtype: str | None = None,
) -> pd.DataFrame:
    """Which model runs on which device, by stack and number format: a row for each combination,
    with the columns of a cell of ``support --json``. Names that are left out stand for all.

    Raises UserError for a name that is none.
    """
    import pandas as pd

    from sarathi_sim.experiments.run.support import supported

    return pd.DataFrame(cell.as_json() for cell in supported(model, device, stack, dtype))


def score_files(
    files: Folder | Sequence[Folder],
    *,
    config: Config | None = None,
    changes: Assignments = (),
    peers: Sequence[Folder] = (),
    fit: bool = False,
    workers: int = 1,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Predict measured servers and say how far off that is: what ``score --json`` prints.

    ``files`` are tables with a row a load or, with the ``config`` that served them, recorded runs.
    ``peers`` are other predictors' files; ``fit`` fits the host's constants anew. Raises
    UserError for a file that cannot be read.
    """
    from sarathi_sim.experiments.report.score_answers import score_recorded

    paths = [Path(one) for one in ([files] if isinstance(files, str | Path) else files)]
    if config is not None:
        return score_recorded(paths, config, changes, progress=progress)[0]
    from sarathi_sim.experiments.lab.servers.commands import fit_host, score

    scored, theirs = fit_host if fit else score, [Path(one) for one in peers]
    return scored(paths, peer=theirs, workers=workers, progress=progress)[0]


def tune(
    files: Folder | Sequence[Folder],
    config: Config,
    changes: Assignments = (),
    *,
    out: Folder | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Calibrate the simulation of the server that ``config`` describes with runs of it, files of a
    load tool; what ``tune --json`` prints. The file ``out`` is what ``calibration`` takes.

    Raises UserError for files that are no runs, a configuration without a stack, and an ``out``
    that is not tune's.
    """
    from sarathi_sim.experiments.config.calibration import check_replaceable
    from sarathi_sim.experiments.measured.tune import tune as tuned
    from sarathi_sim.experiments.report.score_answers import tune_answer
    from sarathi_sim.profiler.storage.files import write_whole

    if out is not None:
        check_replaceable(Path(out))
    paths = [Path(one) for one in ([files] if isinstance(files, str | Path) else files)]
    found = tuned(load(config, changes), paths, progress)
    content = found.content()
    if out is not None:
        write_whole(Path(out), found.calibration.text())
        content["command"] = f"sarathi-sim run {config} --set calibration={out}"
    return content | tune_answer(content).words()


def plot_cdf(axes: Axes, shown: Shown, metric: str = "ttft_s") -> None:
    """Draw the distribution of a metric of requests (of all tokens for ``tbt_s``), a line per
    scenario."""
    from sarathi_sim.experiments.figures.distributions import draw_cdf
    from sarathi_sim.simulator.views.metric_registry import METRICS

    known = [key for key, one in METRICS.items() if one.unit == "s" and one.statistics]
    if metric not in known or metric == "ledger_s":
        raise UserError(f"metric: value {metric!r}: one of {', '.join(known)}")
    draw_cdf(axes, metric, _tables(shown))


def plot_completions(axes: Axes, shown: Shown) -> None:
    """Draw the requests completed over time, a line per scenario."""
    from sarathi_sim.experiments.figures.distributions import draw_completions

    draw_completions(axes, _tables(shown))


def plot_ledger(axes: Axes, shown: Shown, scenario: str) -> None:
    """Draw each stage's time by account, in percent of the run."""
    from sarathi_sim.experiments.figures.distributions import draw_ledger

    draw_ledger(axes, scenario, _tables(shown)[scenario])


def plot_timeline(axes: Axes, run: ScenarioRun, start_s: float, length_s: float) -> None:
    """Draw the work of every stage from ``start_s`` on, for ``length_s`` seconds."""
    from sarathi_sim.experiments.figures.slices import Window, stage_slices
    from sarathi_sim.experiments.figures.style import policy_colour
    from sarathi_sim.experiments.figures.timeline import draw_stages

    window = Window(start_s, length_s)
    policy = run.deployment.scenario.policy.name
    draw_stages(axes, policy, stage_slices(run.analysis, window), policy_colour(policy))
    axes.set(xlim=(window.start_s, window.end_s), xlabel="time (s)")


def _tables(shown: Shown) -> Mapping[str, Tables]:
    return shown.tables if isinstance(shown, ExperimentResult) else shown


def write_report(
    results: Folder | Sequence[Folder], out: Folder, *, title: str | None = None
) -> int:
    """Write finished results as one HTML page, as ``sarathi-sim report`` does; its size in bytes.

    Raises UserError where a folder is not a result, or ``out`` is not ours to replace.
    """
    from sarathi_sim.experiments.report.html_page import write_page

    folders = [results] if isinstance(results, str | Path) else list(results)
    return write_page([Path(folder) for folder in folders], Path(out), title)
