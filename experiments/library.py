"""The library, ``import sarathi_sim as sim``, and the commands: each function here that has options
in its signature is a command of the same name, with the same words and defaults.

docs/research/python.md has an example of each. Names of this module stay; those of others may move.
A parameter without an option (``progress``, ``say``) is Python's alone; there ``out`` left out
keeps nothing, where the command writes ``runs/NAME``.
"""

import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from annotated_types import Ge, Le

from sarathi_sim.profiler.storage.child import Progress, Say, silent
from sarathi_sim.profiler.storage.strict import UserError
from .config.base import Assignments, Config, listed
from .options import (
    LENGTHS,
    RUNS,
    AlsoOption,
    Choosing,
    ConfigArgument,
    ConfigOrExperiment,
    Folder,
    FolderText,
    FolderTexts,
    ModelOption,
    OutOption,
    OutText,
    SetOption,
    SetText,
    Texts,
    Words,
    WorkersOption,
    WorkloadOption,
    backend_of,
    further,
    in_a_paragraph,
    last_of,
    named,
    refuse_options,
    seconds_of,
    written,
)
from .report.section import Result, Section, Table, sentence

if TYPE_CHECKING:
    from .capacity.probing import Laboratory
    from .capacity.slo import CapacitySection
    from .config.loading import Experiment
    from .results import Tables
    from .run.experiment import ExperimentResult


def load(config: Config, changes: Assignments = ()) -> "Experiment":
    """Read a configuration: a file, the name of a shipped one, or a mapping with a file's content.

    ``changes`` are values by key path, ``{"cluster.pp": 4}``. In a mapping, a policy may also be an
    object or a class of the session. Raises UserError, a line per mistake.
    """
    from .config.loading import load_experiment

    return load_experiment(config, changes)


def run(
    config: ConfigOrExperiment,
    changes: SetOption = (),
    *,
    out: OutOption = None,
    figures: Annotated[bool, "Draw figures."] = True,
    timeline: Annotated[bool, "Also write a trace of --window for Perfetto."] = False,
    window: Annotated[
        str | None,
        "START:LENGTH",
        "Start and length (s) of the stage timeline and the trace, such as 120:1.5.  "
        "[default: from the middle of the run]",
    ] = None,
    progress: Progress = silent,
) -> "ExperimentResult":
    """Simulate every scenario of CONFIG.

    Writes tables and figures to a folder.

    \b
    Examples:
      sarathi-sim run gpt3_pp
      sarathi-sim run gpt3_pp --dry-run                     # what would run
      sarathi-sim run my.yaml --set seed=3 --set cluster.pp=4 --out runs/pp4
      sarathi-sim run gpt3_pp --no-figures --json | jq .ratios
      sarathi-sim run gpt3_pp --timeline --window 120:1.5   # open in ui.perfetto.dev
    """
    from .config.loading import Experiment
    from .run.experiment import simulate_all, writing

    if isinstance(config, Experiment) and changes:
        raise UserError("changes: give them to load(), which has made this experiment")
    experiment = config if isinstance(config, Experiment) else load(config, changes)
    if out is None:
        return simulate_all(experiment, progress)
    from .report.run_answers import run_section
    from .report.timeline import default_window, parse_window, write_trace
    from .results import FORMAT, write_summary

    chosen = None if window is None else parse_window(window)
    with writing(experiment, named(out, experiment.name), progress) as (found, folder):
        content = found.summary()
        write_summary(folder, FORMAT, run_section(content).words() | content)
        records = [one.analysis.records for one in found.runs.values()]
        shown = chosen or default_window(records)
        shown.check(max(log.end_s for log in records))
        for name, one in found.runs.items() if timeline else ():
            write_trace(one.analysis, shown, folder / name / "timeline.json.gz")
        if figures:
            from .report.charts import all_run_charts, run_heading
            from .report.draw import draw_all

            charts = all_run_charts(found, shown)
            draw_all(charts, folder / "figures", progress, run_heading(found))
    return found


def result_of(found: "ExperimentResult", out: Folder | None) -> Result:
    """What ``run`` prints."""
    from .report.run_answers import run_section

    content, folder = found.summary(), named(out or "", found.experiment.name)
    section = run_section(content)
    return Result(section.words() | content, section, written=written(out, folder))


def check(config: Config, changes: Assignments = ()) -> Result:
    """Check the model, device, profiles and memory of every scenario; simulate nothing.

    The deployments side by side. Raises UserError, a line per mistake.
    """
    from .config.assumptions import assumed
    from .report.run_answers import check_section
    from .run.experiment import deploy_all

    experiment = load(config, changes)
    deployments = deploy_all(experiment)
    notes = {name: assumed(deployment) for name, deployment in deployments.items()}
    section = check_section(experiment.name, experiment.file, deployments, notes)
    rows = section.tables[0].rows
    cells = {name: {row[0]: row[n] for row in rows} for n, name in enumerate(deployments, 1)}
    return Result({"scenarios": cells, "notes": notes}, section)


def read(folder: Folder) -> "dict[str, Tables]":
    """The tables of every scenario of a result. Raises UserError where it is not one."""
    from .results import read_tables

    return read_tables(Path(folder))


def sweep(
    config: ConfigArgument,
    changes: SetOption = (),
    *,
    out: OutOption = None,
    workers: WorkersOption = None,
    resume: Annotated[bool, "Continue a sweep; finished runs are not repeated."] = False,
    progress: Progress = silent,
    say: Say = silent,
) -> Result:
    """Simulate every run of a sweep.

    The result is a table with a row per run: the swept values and the numbers of its summary, such
    as ttft_s.p99. If runs failed, or the sweep was interrupted, --resume completes it.

    \b
    Examples:
      sarathi-sim sweep pd_sweep --dry-run    # its runs, and how long they take
      sarathi-sim sweep pd_sweep --out runs/pd_sweep
      sarathi-sim sweep pd_sweep --out runs/pd_sweep --resume --workers 4
      sarathi-sim sweep pd_sweep --workers tcp://127.0.0.1:8786
    """
    from .report.run_answers import read_sweep_section
    from .sweeps.execute import Report, execute, failed_runs
    from .sweeps.plan import plan_sweep
    from .sweeps.store import RESULTS, Store

    plan = plan_sweep(config, changes, progress)
    with ExitStack() as stack:
        folder = _folder(out, plan.name, stack)
        store, report = Store(folder), Report(len({run.key for run in plan.runs}))
        backend = stack.enter_context(backend_of(workers))
        store.open(resume)
        try:
            with store.locked():
                deque(execute(plan, store, backend, progress, report, say), maxlen=0)
        except BaseException as error:
            if report.wall_s:  # it had begun
                error.add_note(
                    f"stopped: {report.finished} of {report.total} runs are finished; complete the "
                    "sweep with the same command and --resume"
                )
            raise
        swept, section = read_sweep_section(folder) if report.finished else (None, None)
        say(report.line(backend.workers))
    content = {"runs": report.total, "finished": report.finished, "failures": report.failures}
    failures = failed_runs(report, store.folder / "failed")
    return Result(
        content,
        section,
        table=None if swept is None else swept.table,
        written=written(out, folder),
        rest=RESULTS,
        failures=failures,
        code=int(bool(failures)),
    )


def plan(
    config: Config,
    changes: Assignments = (),
    *,
    workers: WorkersOption = None,
    progress: Progress = silent,
) -> Result:
    """Check the runs of a sweep, and predict how long they take. Raises UserError, a line per
    mistake, and where no Dask scheduler answers."""
    from .sweeps.execute import duration, seconds_of_work
    from .sweeps.plan import axes_rows, plan_sweep

    planned = plan_sweep(config, changes, progress)
    with backend_of(workers) as backend:
        count = backend.workers
    work_s = seconds_of_work(planned) / count
    time = f"predicted {duration(work_s)} on {count} worker{'s' if count > 1 else ''}"
    section = Section(
        *("plan", planned.name, "What would run?"),
        sentence({f"{len(planned.runs)} runs": time}),
        [Table("", ("axis", "values", ""), axes_rows(planned), text=3)],
        warnings=planned.notes,
    )
    return Result({"runs": len(planned.runs), "predicted_s": work_s}, section)


def _folder(out: Folder | None, name: str, stack: ExitStack) -> Path:
    """The folder to write to; without one, a new one that goes with the stack."""
    return named(out or stack.enter_context(TemporaryDirectory(prefix="sarathi-sim-")), name)


def _searched(
    kind: str,
    place: tuple[Folder | None, str],
    section: "CapacitySection",
    how: tuple[int | str | None, Progress, Say],
    search: "Callable[[Laboratory], Iterable[dict[str, Any]]]",
    section_of: Callable[[None, Mapping[str, Any]], Section],
    files: Callable[[dict[str, Any]], Mapping[str, bytes]],
    limit_s: float = math.inf,
) -> Iterator[Result]:
    """The answers of a ``search`` with simulations, partial ones first; the last one's ``files``
    and figures go into the folder of ``place``, if that is not None, or named after its second
    part. ``how``: workers, progress and say. After ``limit_s`` the last partial answer is the
    last; also if the search is interrupted, after its files are written."""
    from .capacity.probing import Laboratory, OutOfTimeError, probes_in, write_result
    from .report.capacity_charts import capacity_charts
    from .report.section import heading_of
    from .results import SUMMARY

    (out, name), until = place, time.monotonic() + limit_s
    content: dict[str, Any] = {}

    def write() -> None:
        old = Path(folder, SUMMARY)
        if content.get("open") and old.is_file():  # a settled answer to the same question stays
            there = json.loads(old.read_bytes())
            if there.get("question") == content["question"] and not there.get("open"):
                return
        if out is not None:
            from .report.draw import figure_files

            if content.get("open"):
                lab.write_tables()
            figures = figure_files(capacity_charts(content), heading_of(content))
            write_result(folder, kind, {**files(content), **figures})

    with ExitStack() as stack:
        folder = _folder(out, name, stack)
        backend = stack.enter_context(backend_of(how[0]))
        store = stack.enter_context(probes_in(folder, kind))
        try:
            lab = Laboratory(section, store, backend, *how[1:], until)
            for content in search(lab):
                answer = section_of(None, content)
                content |= answer.words()
                if content.get("open"):
                    yield Result(content, answer)
        except OutOfTimeError:
            if not content:
                raise UserError(f"--time-limit: there is no answer after {limit_s:g} s") from None
        except (KeyboardInterrupt, GeneratorExit):
            if content:
                write()
            raise
        write()
    yield Result(content, answer, written=written(out, folder))


def workload(
    what: Annotated[
        Config,
        typer.Argument(
            metavar="WHAT", help="A trace (CSV, JSON), a configuration, or lengths (1024:256)."
        ),
        str,
    ],
    changes: SetOption = (),
    *,
    columns: Annotated[
        Mapping[str, str] | Sequence[str],
        typer.Option(
            "--column",
            metavar="MEANING=NAME",
            help="The NAME of a trace's column with this MEANING: arrival, prompt, output, user, "
            "session or turn. May be repeated.",
        ),
        list[str],
    ] = (),
    out: AlsoOption = None,
) -> Result:
    """Say what is in a workload.

    For each scenario: lengths in tokens, rates in requests/s, burstiness, and how much of the
    prompts is shared. WHAT is a trace (as in the key `workload.lengths.path`), a configuration
    (whose requests are drawn), or lengths as in --workload elsewhere (docs/research/workloads.md).

    \b
    Examples:
      sarathi-sim workload trace.csv
      sarathi-sim workload log.jsonl --column prompt=tokens_in --column output=tokens_out
      sarathi-sim workload failures.csv --set workload.lengths.skip_empty=true
      sarathi-sim workload shared_prefixes --out runs/workload
      sarathi-sim workload 1024:256~0.5 --json
    """
    from .report.run_answers import workload_section
    from .results import WORKLOAD_FORMAT, check_replaceable, result_folder, write_summary
    from .run.traffic import describe, workloads_of

    if out is not None:
        check_replaceable(Path(out), WORKLOAD_FORMAT)
    own = columns if isinstance(columns, Mapping) else dict(c.partition("=")[::2] for c in columns)
    found = workloads_of(what, changes, own)
    described = describe(found)
    content = {"workloads": described}
    if out is not None:
        from .report.charts import workload_charts
        from .report.draw import draw_all

        with result_folder(Path(out), WORKLOAD_FORMAT) as folder:
            write_summary(folder, WORKLOAD_FORMAT, content)
            for name, (requests, clients) in found.items():
                charts = {re.sub("[:@?~]", "-", name): workload_charts(requests, clients)}
                said = f"{name}: {len(requests):,} requests"
                draw_all(charts, folder / "figures", heading=said)
    return Result(content, workload_section(described), written=written(out))


def compare(
    a: Annotated[
        FolderText, typer.Argument(metavar="A", help="A result, or a scenario's folder in it.")
    ],
    b: Annotated[FolderText, typer.Argument(metavar="B", help="Another result.")],
    *,
    out: AlsoOption = None,
    progress: Progress = silent,
) -> Result:
    """Say how the latencies of two results differ, and why.

    Both are simulated again from their config.yaml. The parts of the time (in seconds) add up to
    the difference exactly. Of results with prefill and decode pools only metrics are compared.

    \b
    Examples:
      sarathi-sim compare runs/gpt3_pp/orca_pp runs/gpt3_pp/sarathi_pp
      sarathi-sim compare runs/before runs/after --out runs/difference
      sarathi-sim compare runs/before runs/after --json
    """
    from .report.run_answers import comparison_section
    from .results import FIGURES_FORMAT, check_replaceable, result_folder, write_summary
    from .run.compare import compare as compared

    if out is not None:
        check_replaceable(Path(out), FIGURES_FORMAT)
    found = compared(Path(a), Path(b), progress)
    section = comparison_section(found)
    content = section.words() | found
    if out is not None:
        from .report.draw import draw_all
        from .report.section import heading_of

        with result_folder(Path(out), FIGURES_FORMAT) as folder:
            write_summary(folder, FIGURES_FORMAT, {"plotted": [found["a"], found["b"]]} | content)
            charts = {"comparison": section.charts} if section.charts else {}
            draw_all(charts, folder / "figures", progress, heading_of(content))
    return Result(content, section, written=written(out))


def plot(
    folders: Annotated[
        FolderTexts, typer.Argument(metavar="DIR...", help="Results of runs, or one sweep.")
    ],
    *,
    out: Annotated[
        OutText, "Folder of the figures.  [default: runs/plot, or figures in the sweep]"
    ] = None,
    metrics: Annotated[
        Texts, "--metric", "NAME", "For a sweep: a metric to draw; may be repeated."
    ] = (),
    over: Annotated[Texts, "AXIS", "For a sweep: an axis to draw over; may be repeated."] = (),
    progress: Progress = silent,
) -> Result:
    """Draw several runs into the same figures, or draw a sweep.

    \b
    Examples:
      sarathi-sim plot runs/gpt3_pp
      sarathi-sim plot runs/pp4 runs/pp8 --out runs/pp4_and_pp8
      sarathi-sim plot runs/pd_sweep
      sarathi-sim plot runs/pd_sweep --over policy.chunk_size --metric mfu --metric bubble_s.p50
    """
    from .report.draw import draw_all
    from .results import FIGURES_FORMAT, check_replaceable, result_folder, write_summary
    from .sweeps.store import RESULTS
    from .sweeps.sweep import is_sweep

    paths = [Path(folder) for folder in folders]
    of_sweep = len(paths) == 1 and is_sweep(paths[0])
    if (metrics or over) and not of_sweep:
        raise UserError("--metric and --over need the folder of one sweep")
    target = Path(out or (paths[0] / "figures" if of_sweep else "runs/plot"))
    if target.resolve() in {path.resolve() for path in paths}:
        raise UserError(f"--out {target}: is one of the results to plot: name another folder")
    check_replaceable(target, FIGURES_FORMAT)
    if of_sweep:
        from .report.run_answers import read_sweep_section
        from .report.sweep_charts import sweep_charts, sweep_heading

        swept, section = read_sweep_section(paths[0])
        charts, note = sweep_charts(swept, metrics, over)
        note = f"{note}; their numbers are in {paths[0] / RESULTS}" if note else ""
        section = replace(section, warnings=[*section.warnings, *filter(None, [note])])
        with result_folder(target, FIGURES_FORMAT) as folder:
            draw_all(charts, folder, progress, sweep_heading(swept))
            write_summary(folder, FIGURES_FORMAT, {"plotted": [paths[0].name]})
        return Result({}, section, written=[target], rest=RESULTS)
    from .report.charts import run_charts
    from .report.section import heading_of
    from .results import read_summary
    from .run.compare import labelled_tables

    tables = {label: table for label, (_, _, table) in labelled_tables(paths).items()}
    with result_folder(target, FIGURES_FORMAT) as folder:
        write_summary(folder, FIGURES_FORMAT, {"plotted": sorted(tables)})
        heading = heading_of(*map(read_summary, paths))
        draw_all(run_charts(tables), folder / "figures", progress, heading)
    return Result({}, written=[target])


def report(
    results: Annotated[
        FolderTexts,
        typer.Argument(
            metavar="RESULT...", help="Results of run, sweep, compare, score, capacity, recommend."
        ),
    ],
    *,
    out: Annotated[OutText, "FILE.html", "[default: RESULT.html, next to the first RESULT]"] = None,
    title: Annotated[str | None, "Heading of the page."] = None,
    progress: Progress = silent,
) -> Result:
    """Write results into one HTML page to share.

    The page has the question, the answer, sortable tables, interactive charts, the configuration
    and the errors of the op times. It opens without a network connection. Runs are simulated
    again to draw their timelines.

    \b
    Examples:
      sarathi-sim report runs/gpt3_pp
      sarathi-sim report runs/pd_sweep runs/difference --out for_the_team.html
    """
    from .report.page import write_page

    folders = [Path(folder) for folder in results]
    first = folders[0].resolve()
    target = Path(out or first.with_name(f"{first.name}.html"))
    write_page(folders, target, title, progress)
    return Result({}, written=[target])


def capacity(
    config: ConfigArgument,
    changes: SetOption = (),
    *,
    workload: WorkloadOption = None,
    bands: Annotated[bool, "Also search with the errors of the op times."] = True,
    prices: Annotated[str | None, "YAML file of prices.  [default: shipped assumptions]"] = None,
    refine: Annotated[
        int, Ge(0), Le(10), "Rounds that try settings halfway between the best and its neighbours."
    ] = 0,
    sensitivity: Annotated[bool, "Which factor changes the capacity most?"] = False,
    by: Annotated[float, "With --sensitivity: the change of each factor, 0.1 is 10 %."] = 0.1,
    only: Annotated[Words, "With --sensitivity: only these factors, separated by commas."] = None,
    metrics: Annotated[
        Texts,
        "--metric",
        "NAME",
        "With --sensitivity: a metric of a run, such as ttft_s.p99, instead of the capacity; "
        "may be repeated.",
    ] = (),
    replications: Annotated[
        int, Ge(1), Le(100), "With --sensitivity: runs with different seeds."
    ] = 3,
    out: OutOption = None,
    workers: WorkersOption = None,
    progress: Progress = silent,
    say: Say = silent,
) -> Result:
    """Find the highest load that a deployment sustains under an SLO.

    The section `capacity` of CONFIG states the SLO and the deployments to compare. Finished
    simulations stay in the folder: after an interruption, the same command continues. --workload
    replaces the lengths of CONFIG. --refine also tries settings between the best deployment and its
    neighbours. --sensitivity changes one factor at a time (op times, link speed, host time, prompt
    and output lengths, burstiness) and shows its effect on the capacity or, without a section
    `capacity`, on metrics of a run (docs/plan/settings.md).

    \b
    Examples:
      sarathi-sim capacity capacity_llama3_70b
      sarathi-sim capacity capacity_llama3_70b --set 'capacity.slo=p99 ttft 1s, p99 tbt 100ms'
      sarathi-sim capacity my.yaml --workload 1024:256 --refine 2
      sarathi-sim capacity my.yaml --out runs/capacity --json | jq '.deployments[].capacity'
      sarathi-sim capacity my.yaml --sensitivity --by 0.2 --only 'attn_decode,link speed'
      sarathi-sim capacity gpt3_pp --sensitivity --metric makespan_s --metric tbt_s.p99
    """
    from .capacity.answer import answered, capacities, load_prices, read_question, result_files
    from .capacity.probing import CAPACITY_FORMAT, SENSITIVITY_FORMAT
    from .capacity.sensitivity import read_sensitivity, sensitivity_files, table_of
    from .capacity.sensitivity import sensitivity as changed
    from .config.loading import refuse_of_session
    from .report.capacity_answers import capacity_section, sensitivity_section

    how = (workers, progress, say)
    if sensitivity:
        others = {"no-bands": not bands, "prices": prices, "refine": refine}
        refuse_options(others, "with --sensitivity")
        names = [*filter(None, listed(only))]
        asked = read_sensitivity(
            config, changes, workload, by=by, only=names, metrics=metrics, replications=replications
        )
        (found,) = _searched(
            *(SENSITIVITY_FORMAT, (out, f"{asked.draft.header.name}_sensitivity"), asked.section),
            *(how, lambda lab: [changed(lab, asked)], sensitivity_section),
            lambda content: sensitivity_files(asked, content),
        )
        found.table = table_of(found)
        return found
    own = {"by": by != 0.1, "only": only, "metric": metrics, "replications": replications != 3}
    refuse_options(own, "without --sensitivity")
    draft, section, options = read_question(config, changes, workload)
    costs = load_prices(prices)
    for option in options:
        refuse_of_session(option.scenario, draft.source)
    (found,) = _searched(
        *(CAPACITY_FORMAT, (out, draft.header.name), section, how),
        lambda lab: [answered(lab, draft, options, bands, costs, refine)],
        capacity_section,
        lambda content: result_files(draft, section, content),
    )
    found.table = capacities(found["deployments"])
    return found


def partial_answers(
    model: ModelOption,
    device: Annotated[Words, "Devices, as in l40s,h100-80g-sxm."],
    slo: Annotated[str | None, "Latency limits, such as 'p99 ttft 1s, p99 tbt 50ms'."] = None,
    *,
    gpus: Annotated[int | None, Ge(1), Le(1024), "Number of GPUs."] = None,
    rate: Annotated[float | None, Ge(1e-3), Le(1e6), "Or: the requests/s to sustain."] = None,
    workload: Annotated[
        str | None, "LENGTHS", f"{LENGTHS}  [default: Azure's conversation trace of 2023]"
    ] = None,
    stack: Annotated[Words, "Engines, as in vllm,sglang,trtllm."] = None,
    dtype: Annotated[Words, "Weight formats, as in bf16,fp8.  [default: the model's]"] = None,
    budget: Annotated[Words, "Token budgets (max_num_batched_tokens), as in 512,2048."] = None,
    seqs: Annotated[Words, "Sequence limits (max_num_seqs), as in 64,256."] = None,
    pools: Annotated[bool, "Also try separate prefill and decode workers."] = False,
    policy: Annotated[
        Literal["sarathi"] | None,
        "Choose chunk size and largest batch of Sarathi, for one TP group of --gpus.",
    ] = None,
    speculation: Annotated[
        str | None,
        "METHOD[:ACCEPTANCE]",
        "Also try speculation by mtp, eagle3 or ngram. ACCEPTANCE: golden "
        "(published; the default), golden_thinking_off, or the probability that each draft is "
        "accepted given those before, as 0.8,0.6.",
    ] = None,
    changes: Annotated[SetText, "--set", "NAME=VALUE", in_a_paragraph(Choosing)] = (),
    time_limit: Annotated[
        float | str | None, "TIME", "Give the best answer so far after 10s, 2min, ...", str | None
    ] = None,
    out: Annotated[OutText, "[default: runs/recommend]"] = None,
    workers: WorkersOption = None,
    progress: Progress = silent,
    say: Say = silent,
) -> Iterator[Result]:
    """Find the best deployment under an SLO.

    With --gpus the best deployment sustains the highest load for its price; with --rate it costs
    least for that load. Bounds and short runs rule out most layouts, token budgets and sequence
    limits; a search finds the capacity of the best. For mixtures of experts it also tries DP
    attention. The result has the command that starts the engine, and a configuration. --pools
    also tries separate prefill and decode workers, and finds how many of each. --policy sarathi
    chooses the chunk size and the largest batch with the most tokens/s, if all requests arrive
    at once. It needs no --slo, or one that limits p99 tbt; --seqs is the largest batch to try.

    A first answer comes after seconds, and better ones follow up to the final one. After
    --time-limit or Ctrl-C the answer is not settled; the same command continues from there.

    \b
    Examples:
      sarathi-sim recommend --model llama-3.3-70b --device h100-80g-sxm --gpus 16 \\
        --stack vllm --slo "p99 ttft 1s, p99 tbt 50ms"
      sarathi-sim recommend --model llama-3.1-8b --device l40s,h100-80g-sxm --rate 20 \\
        --slo "attainment 95% ttft 1s tpot 50ms" --workload 1024:256 --set tolerance=0.1
      sarathi-sim recommend --policy sarathi --model llama-13b --device a6000 --gpus 1 \\
        --workload 1K@14 --seqs 18
    """
    from .capacity.answer import load_prices
    from .capacity.options import counts, wanted_of
    from .capacity.probing import RECOMMEND_FORMAT
    from .capacity.recommend import recommend_files, recommended
    from .report.capacity_answers import chunk_section, recommend_section

    chosen = further(Choosing, changes)
    if policy is None:
        refuse_options({"set profiles": chosen.profiles}, "without --policy")
    else:
        from .capacity.slo import limit_of
        from .run.machine import advise, machine_of
        from .run.traffic import demand_of

        unused: dict[str, object] = {
            "rate": rate,
            "stack": stack,
            "dtype": dtype,
            "pools": pools,
        }
        unused |= {"budget": budget, "speculation": speculation, "out": out not in (None, RUNS)}
        unused["time-limit"] = time_limit
        for name, default in vars(Choosing()).items():
            unused[f"set {name}"] = name != "profiles" and getattr(chosen, name) != default
        refuse_options(unused, f"with --policy {policy}")
        if workload is None or gpus is None:
            raise UserError(f"--policy {policy}: needs --workload and --gpus")
        machine = machine_of(model, ",".join(listed(device)), gpus, chosen.profiles)
        content = {"model": model} | advise(
            *(machine, demand_of(workload)),
            batch_cap=max(counts("--seqs", seqs, least=2), default=None),
            tbt_limit_s=None if slo is None else limit_of(slo, "p99", "tbt_s"),
            progress=lambda done, total: progress("simulations", done, total),
        )
        answer = chunk_section(content)
        yield Result(content | answer.words(), answer)
        return
    if slo is None:
        raise UserError("--slo: is missing: give one such as 'p99 ttft 1s, p99 tbt 50ms'")
    drafts = [chosen.drafts] if isinstance(chosen.drafts, int) else chosen.drafts
    wanted = wanted_of(
        *(model, device, slo, gpus, rate, workload, chosen.max_length),
        *(stack, dtype, budget, seqs, chosen.tolerance, chosen.rejected),
        *(pools, speculation, drafts),
    )
    costs = load_prices(chosen.prices)
    found = _searched(
        *(RECOMMEND_FORMAT, (out, "recommend"), wanted.section, (workers, progress, say)),
        lambda lab: recommended(lab, wanted, costs, say, chosen.refine),
        recommend_section,
        lambda content: recommend_files(wanted, content),
        seconds_of("--time-limit", time_limit),
    )
    yield from map(_with_launch_file, found)


def _with_launch_file(found: Result) -> Result:
    """The answer with the short command of its ``launch.sh``, if that is written."""
    if found.written and found["command"] and found.section is not None:
        first, *_ = found["deployments"] or found["screened"]
        several = " x " not in first["name"]  # two pools
        launch = f"{'cat' if several else 'sh'} {found.written[0] / 'launch.sh'}"
        found.section = replace(found.section, command=launch)
    return found


recommend = last_of(partial_answers, "recommend")


def list_(
    what: Annotated[
        Literal["models", "devices", "policies", "support"],
        typer.Argument(help="What to list; support: which model runs on which device."),
    ],
    *,
    model: Annotated[
        str | None, "With support: a shipped model, its Hub name, or config.json."
    ] = None,
    device: Annotated[str | None, "With support: a shipped device, or a device YAML."] = None,
    stack: Annotated[str | None, "With support: vllm, sglang or trtllm.  [default: all]"] = None,
    dtype: Annotated[
        str | None, "With support: format of the weights.  [default: all; for the matrix, bf16]"
    ] = None,
) -> Result:
    """List models, devices, policies, or which model runs where.

    `list support` shows for each engine and number format the origin of the op times (measured,
    interpolated or modelled) and their error, the smallest layout that holds the model, and what is
    refused and why. With --model and --device it also shows the origin of every op, and the parts
    of a GPU's memory. `list policies` shows the keys of a configuration's `policy`.

    \b
    Examples:
      sarathi-sim list models --json | jq '.["llama-3.1-8b"].num_kv_heads'
      sarathi-sim list policies
      sarathi-sim list support --dtype fp8 --stack sglang
      sarathi-sim list support --model llama-3.3-70b --device h100-80g-sxm
      sarathi-sim list support --device l40s --json | jq '.cells[] | select(.runs)'
    """
    from .report.score_answers import devices, models, policies, support_section

    if what != "support":
        if any(option is not None for option in (model, device, stack, dtype)):
            raise UserError("--model, --device, --stack and --dtype need list support")
        return {"models": models, "devices": devices, "policies": policies}[what]()
    import pandas as pd

    from .run.support import supported

    found = supported(model, device, stack, dtype)
    rows = [cell.as_json() for cell in found]
    section = support_section(found, model, device, dtype)
    return Result({"cells": rows}, section, table=pd.DataFrame(rows))
