"""The commands of the laboratory: ``sarathi-sim lab COMMAND``. What they print proves something;
nothing that decides asks them."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sarathi_sim.profiler.storage.child import Progress, Say, silent
from sarathi_sim.profiler.storage.strict import UserError, did_you_mean
from ..cli import application, command
from ..options import (
    RUNS,
    AlsoOption,
    Folder,
    ModelOption,
    OutOption,
    SetOption,
    WorkersOption,
    backend_of,
    named,
    written,
)
from ..own_server import PROFILES
from ..report.section import Result, Section, Table, enumerated, heading, write_section

DatasetsOption = Annotated[
    Path | None,
    typer.Option(help="Folder of public measurements.  [default: $SARATHI_SIM_DATASETS]"),
]
TablesArgument = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Measured servers: CSV, one row per load.")
]
PeerOption = Annotated[
    list[Path] | None,
    typer.Option(help="Another predictor's file (id, ttft_ms, tpot_ms); may be repeated."),
]
LengthsOption = Annotated[
    Path | None,
    typer.Option(help="FILE has MLPerf's runs (docs/lab/mlperf.md); folder of lengths_MODEL.csv."),
]
LaunchOption = Annotated[
    Path | None,
    typer.Option(help="How servers with prefill and decode pools were started: CSV, by id."),
]
ProfilesOption = Annotated[Path, typer.Option(help="Root folder of profiles.")]


def _folder(out: Folder | None, kind: str) -> AbstractContextManager[Path | None]:
    """The result's folder, made before the work: one may not be allowed to."""
    from ..results import result_folder

    return nullcontext() if out is None else result_folder(Path(out), kind)


def _answered(
    content: dict[str, Any], section: Section, out: Folder | None = None, code: int = 0
) -> Result:
    return Result(content | section.words(), section, written=written(out), code=code)


def score(
    files: TablesArgument,
    *,
    peer: PeerOption = None,
    lengths: LengthsOption = None,
    launch: LaunchOption = None,
    out: AlsoOption = None,
    workers: WorkersOption = None,
    progress: Progress = silent,
    say: Say = silent,
    fit: bool = False,
) -> Result:
    """Predict measured servers, and print the errors.

    A row of FILE is a server (model, GPU, engine, precision, layout) under a load (prompt and
    output lengths, concurrency) with its mean TTFT and TPOT. Rows that are not modelled are
    counted with the reason. The host's constants are those of data/host_time.yaml that were fitted
    without the row's server. For MLPerf's runs (--lengths) it predicts the capacity under their
    P99 limits, and the latencies at their rate. Servers with separate prefill and decode workers
    need --launch.

    \b
    Examples:
      sarathi-sim lab score inferencex_dev.csv --peer aiconfigurator.csv --out runs/score --json
      sarathi-sim lab score mlperf_dev.csv --lengths mlperf --out runs/mlperf
      sarathi-sim lab score inferencex_dev.csv --launch disagg_recipes.csv --out runs/pools
    """
    from ..report.draw import draw_all
    from ..results import SCORE_FORMAT, write_summary
    from .servers.answers import servers_answer
    from .servers.mlperf import ScoredMlperf, score_mlperf
    from .servers.score import ScoredRows, score_servers
    from .servers.score_charts import median_errors, score_charts

    for option, value in (("--launch", launch), ("--peer", peer)):
        if lengths is not None and value:
            raise UserError(f"{option} does not go with --lengths, which reads MLPerf's tables")
    scored: ScoredRows | ScoredMlperf
    with _folder(out, SCORE_FORMAT) as folder, backend_of(workers) as backend:
        how = (backend, progress, say)
        if lengths is not None:
            scored = score_mlperf(files, lengths, *how, fit=fit)
        else:
            scored = score_servers(files, peer or [], *how, fit=fit, launch=launch)
        content = scored.content()
        section = servers_answer(content)
        if folder is not None:
            write_summary(folder, SCORE_FORMAT, content | section.words())
            write_section(folder, replace(section, charts=median_errors(content.get("groups", {}))))
            scored.write(folder)
            if charts := score_charts(scored):
                about = enumerated([Path(file).stem for file in files])
                draw_all(charts, folder / "figures", progress, about)
    return _answered(content, section, out)


def fit_host(
    files: TablesArgument,
    *,
    peer: PeerOption = None,
    lengths: LengthsOption = None,
    out: AlsoOption = None,
    workers: WorkersOption = None,
    progress: Progress = silent,
    say: Say = silent,
) -> Result:
    """Fit the host's constants to measured servers, and score them on rows left out.

    Each row of FILE is predicted from the rows of other servers only; then only of other stacks, of
    other GPUs, of other models. With --lengths it fits the constants of TensorRT's engines, those
    of each system to the others. --out gets the constants in the form of data/.

    \b
    Examples:
      sarathi-sim lab fit-host inferencex_dev.csv --out runs/fit
      sarathi-sim lab fit-host mlperf_dev.csv --lengths mlperf
    """
    how: dict[str, Any] = {"workers": workers, "progress": progress, "say": say}
    return score(files, peer=peer, lengths=lengths, out=out, **how, fit=True)


def validate(
    config: Annotated[
        str, typer.Argument(metavar="[CONFIG]", help="A YAML file, or a shipped validate_*.")
    ] = "validate_cpu",
    changes: SetOption = (),
    *,
    out: OutOption = None,
    realtime: Annotated[
        bool, typer.Option("--realtime", help="Stop other programs on the cores (root, Linux).")
    ] = False,
    profiles: ProfilesOption = PROFILES,
    progress: Progress = silent,
    say: Say = silent,
) -> Result:
    """Run a real engine beside the simulator (needs torch).

    The report says whether both form the same batches, how well each iteration's time is predicted,
    and how far whole runs differ: from times measured in the engine, and from this device's bundle
    in --profiles, if it has one. On a busy machine it says nothing about times. The exit code is
    1 if batches differ.

    \b
    Examples:
      sarathi-sim lab validate validate_cpu --set validation.repeats=2 --out runs/quick
      sarathi-sim lab validate validate_gpu --set model=llama-3-8b --dry-run
    """
    from ..report.draw import draw_all
    from ..results import ITERATIONS, VALIDATION, VALIDATION_FORMAT, json_bytes, result_folder
    from .engines.cells import make_cells
    from .engines.validation import check_machine, iterations, load_validation, measure
    from .servers.answers import validation_answer
    from .servers.score_charts import validation_charts

    experiment = load_validation(config, changes)
    folder = named(RUNS if out is None else out, experiment.name)
    cells = make_cells(experiment)
    check_machine(realtime=realtime)
    if realtime:
        say("warning: --realtime stops the machine's other programs during the run")
    with result_folder(folder, VALIDATION_FORMAT) as scratch:
        content, outcomes = measure(experiment, cells, profiles, progress, say, realtime)
        section = validation_answer(content)
        (scratch / VALIDATION).write_bytes(json_bytes(content | section.words()))
        write_section(scratch, section)
        iterations(outcomes).to_parquet(scratch / ITERATIONS, index=False)
        devices = [str(cell.scenario.device) for cell in cells]
        about = heading(experiment.name, [cell.model.name for cell in cells], devices)
        draw_all(validation_charts(outcomes), scratch / "figures", progress, about)
    differ = any(cell["parity"] < 1 for cell in content["cells"].values())
    return _answered(content, section, folder, code=int(differ))


def cells(config: str = "validate_cpu", changes: SetOption = ()) -> Result:
    """Check CONFIG, and say what would run."""
    from .engines.cells import cells_table, make_cells
    from .engines.validation import load_validation

    table = cells_table(make_cells(load_validation(config, changes)))
    return Result({}, Section("validation", config, "What would run?", "", [table]))


def lockstep(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="Recorded decisions.")],
    *,
    progress: Progress = silent,
) -> Result:
    """Compare our scheduler with an engine's recorded decisions.

    The arrivals and returns of each log are fed to our scheduler. Every decision is compared: the
    batch and its order, computed tokens, preempted requests, free blocks, running and waiting
    requests. If one differs, the exit code is 1 and both sides of the first difference are printed.

    \b
    Examples:
      sarathi-sim lab lockstep tests/data/vllm/*.jsonl.gz
    """
    from .engines.lockstep import read_log, replay
    from .servers.answers import lockstep_answer

    read, compared = [read_log(path) for path in logs], {}
    for number, (path, log) in enumerate(zip(logs, read, strict=True)):
        name = log.name if [each.name for each in read].count(log.name) == 1 else str(path)
        compared[name] = replay(log)
        progress("logs", number + 1, len(read))
    content = {"logs": {name: vars(one) for name, one in compared.items()}}
    differ = any(one.first_difference is not None for one in compared.values())
    return _answered(content, lockstep_answer(compared), code=int(differ))


def import_profile(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="vidur, aiconfigurator or llmservingsim.")
    ],
    path: Annotated[Path, typer.Argument(help="Folder of the source's files.")],
    *,
    model: ModelOption,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree.")] = 1,
    device: Annotated[
        str | None, typer.Option(help="The device it was measured on.  [default: the folder's]")
    ] = None,
    out: ProfilesOption = PROFILES,
    force: Annotated[bool, typer.Option("--force", help="Also replace a measured bundle.")] = False,
) -> Result:
    """Make a profile bundle from published measurements.

    The measurements do not ship with the package: data/README.md says where to get them, and which
    files each source reads. GEMM shapes that the source lacks are interpolated. Other head counts
    are scaled. What was not measured comes from the device's calibrated model. meta.yaml marks each
    of these.

    \b
    Examples:
      sarathi-sim lab import vidur datasets/vidur --model llama-2-70b --tp 4 --out profiles
      sarathi-sim lab import llmservingsim datasets/llmservingsim_rtx4090 --model llama-3-8b
    """
    from sarathi_sim.profiler.bundle.schema import bundle_path, write_bundle
    from .fit.bundles import import_bundle

    bundle = import_bundle(source, path, model, tp, device)
    folder = bundle_path(out, bundle.meta.device, bundle.meta.model, tp)
    write_bundle(bundle, folder, force=force)
    about = bundle.meta.environment
    marks = {op: str(mark).partition(": ") for op, mark in about.items()}
    whole = ("repository", "licence", "hardware")
    rows = [(op, how, origin) for op, (how, _, origin) in marks.items() if op not in whole]
    answer = f"{about['repository']} ({about['licence']}), {about['hardware']}"
    table = Table("", ("op", "how", "from"), rows, text=3)
    section = Section("import", source, "What was measured?", answer, [table])
    return _answered({}, section, folder)


def accuracy(
    *, datasets: DatasetsOption = None, out: AlsoOption = None, progress: Progress = silent
) -> Result:
    """Score the regressions on public measurements (needs them).

    Only rows that were not fitted count. The first table has a row for each score, with its targets
    and why it misses one; the second has one for each class. The kernels' errors were recorded with
    the shipped fits: `lab calibrate --stack` fits them again.

    \b
    Examples:
      sarathi-sim lab accuracy --datasets measurements
    """
    from sarathi_sim.profiler.storage.files import public_datasets
    from ..results import ACCURACY_FORMAT, write_summary
    from .fit import accuracy as fits
    from .servers.answers import accuracy_answer

    folder, scores = public_datasets(datasets), list[fits.Score]()
    with _folder(out, ACCURACY_FORMAT) as target:
        for done, study in enumerate(fits.STUDIES.values()):
            progress("studies", done, len(fits.STUDIES))
            scores += study(folder)
        scores += (score for spec in fits.shipped_stacks() for score in fits.scores_of(spec))
        content = {
            "scores": [score.content() for score in scores],
            "classes": [asdict(one) for one in fits.by_class(scores)],
        }
        section = accuracy_answer(content)
        if target is not None:
            write_summary(target, ACCURACY_FORMAT, content | section.words())
            write_section(target, section)
    return _answered(content, section, out)


def calibrate(
    *,
    device: Annotated[str | None, typer.Option(help="One device.  [default: all]")] = None,
    stack: Annotated[
        str | None,
        typer.Option(help="Fit the kernels of vllm, sglang or trtllm instead of device models."),
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option(
            help="With --stack, fit only these: gemm,attention,moe,all_reduce,all_to_all,wide."
        ),
    ] = None,
    datasets: DatasetsOption = None,
    report: Annotated[
        bool, typer.Option("--report", help="Print the stored errors instead of fitting again.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Store the fit in the shipped device files.")
    ] = False,
    say: Say = silent,
) -> Result:
    """Fit device models, or a stack's kernels, to public measurements (needs them).

    Prints the error on rows held out of the fit. data/README.md says where the files come from.
    --report needs no files.

    \b
    Examples:
      sarathi-sim lab calibrate --report
      sarathi-sim lab calibrate --device h100-80g-sxm --stack vllm --datasets measurements
    """
    from sarathi_sim.profiler.storage.files import public_datasets

    if report and write:
        raise UserError("--write: does not go with --report, which fits nothing")
    fit = partial(_devices, device) if stack is None else partial(_kernels, device, stack, tables)
    grids, written = fit(None if report else public_datasets(datasets), write, say)
    section = Section("calibrate", "", "How far off is the fit?", "", grids)
    return Result({}, section, written=written)


Fits = tuple[list[Table], list[Path]]


def _devices(device: str | None, datasets: Path | None, write: bool, say: Say) -> Fits:
    """The errors of device models, fitted or (without ``datasets``) stored."""
    from .fit import devices as fits

    grids, written = list[Table](), list[Path]()
    if datasets is None:
        models = fits.fitted_devices(device)
    else:
        names = [device] if device else fits.STUDIES
        results = {name: fits.calibrate(name, datasets, say) for name in names}
        models = {name: result.fitted for name, result in results.items()}
        written += [path for one in results.values() if write for path in one.write()]
    for name, fitted in models.items():
        for title, frame in (
            ("errors on rows held out of the fit, in percent", fits.report(fitted)),
            ("by range, at tile edges, and on other sources' rows", fits.structure(fitted)),
        ):
            rows = frame.map(lambda cell: f"{cell:.1f}" if isinstance(cell, float) else str(cell))
            grid = (f"{name}: {title}", [*frame], rows.to_numpy().tolist())
            grids.append(Table(*grid, text=len(frame.columns)))
    return grids, written


def _kernels(
    device: str | None, stack: str, tables: str | None, datasets: Path | None, write: bool, say: Say
) -> Fits:
    """The errors of a stack's kernels on one device or all; without ``datasets`` those stored."""
    from sarathi_sim.profiler.kernels.stack_file import load_stack, write_stack
    from sarathi_sim.profiler.storage.files import data_dir
    from .fit.accuracy import scores_of
    from .fit.kernels import FAMILIES, check_fitted, fit_stack
    from .servers.answers import scores_table

    grids, written = list[Table](), list[Path]()
    families = tables.split(",") if tables else FAMILIES
    for name in families:
        if name not in FAMILIES:
            raise UserError(f"--tables {name}: must be one of {', '.join(FAMILIES)}")
    for name in check_fitted(device, stack):
        if datasets is None:
            spec = load_stack(name, stack)[0]
        else:
            spec, arrays = fit_stack(datasets, name, stack, say, families=families)
            if write:
                written += write_stack(spec, arrays, data_dir() / "kernels")
        grids.append(scores_table(score.content() for score in scores_of(spec)))
    return grids, written


def reproduce(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="IDs of claims.  [default: all]")
    ] = None,
    *,
    variant: Annotated[
        str | None, typer.Option(help="predicted or paper-calibrated.  [default: both]")
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="List the claims and how each is read.")
    ] = False,
    out: AlsoOption = None,
    progress: Progress = silent,
) -> Result:
    """Compute the paper's numbers, each next to the published one.

    --out also gets figures and tables; without IDs also the possible readings of the pipeline
    experiment, over five seeds.

    \b
    Examples:
      sarathi-sim lab reproduce tile_257 pd_peak_256_at --variant predicted
      sarathi-sim lab reproduce --out runs/paper
      sarathi-sim lab reproduce --list
    """
    from ..results import PAPER_FORMAT, write_summary
    from .paper.claims import claims_section, pick_claims
    from .paper.claims import reproduce as compute
    from .paper.figures import write_gallery
    from .paper.variants import VARIANTS, Lab

    claims = pick_claims(ids or ())
    if listing:
        for one in claims:
            typer.echo(f"{one.id} (section {one.section}): {one.metric}; {one.setting}")
            typer.echo(f"    {one.reading}")
        return Result({})
    labs = [Lab(name) for name in VARIANTS]
    wanted = [lab for lab in labs if variant in (None, lab.variant)]
    if not wanted:
        hint, allowed = did_you_mean(str(variant), VARIANTS), ", ".join(VARIANTS)
        raise UserError(f"--variant {variant}: no such variant{hint}; allowed: {allowed}")
    with _folder(out, PAPER_FORMAT) as folder:
        results = compute(claims, wanted, progress)
        content = {"claims": [result.row() for result in results]}
        if folder is not None:
            write_gallery(folder, labs, None if ids else results, progress)
            write_summary(folder, PAPER_FORMAT, content)
    return Result(content, claims_section(results), written=written(out))


def first_light(
    *,
    out: Annotated[
        Path, typer.Option(help="Folder of all measurements; OUT.zip has the same files.")
    ] = Path("first-light"),
    resume: Annotated[
        Path | None,
        typer.Option(metavar="ARCHIVE", help="Continue from this archive, on any machine."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Time limit: begin no step that could end later.")
    ] = None,
    rehearsal: Annotated[
        bool, typer.Option("--dry-run", help="The same steps on a tiny model, also without a GPU.")
    ] = False,
) -> Result:
    """Measure everything that a first hour on a GPU node allows (needs torch).

    Every step is a process with a time limit: it probes the machine, profiles models, compares them
    with the shipped kernels of this GPU, and validates. After an interruption, the same command
    continues. On another machine with the same GPU --resume continues from the archive, which is
    written after every step. The exit code is 1 if steps failed or are not done.

    \b
    Examples:
      sarathi-sim lab first-light --minutes 10
      sarathi-sim lab first-light --resume first-light.zip --out more
      sarathi-sim lab first-light --dry-run --out rehearsal
    """
    from .engines.first_light import Hour
    from .engines.validation import check_machine

    check_machine()
    hour = Hour(out, typer.echo, rehearsal)
    done = hour.run(float("inf") if minutes is None else minutes, resume)
    return Result({}, written=[hour.archive], code=int(not done))


_whole = partial(command, verbose=False)

app = application(
    {
        "Servers": {"score": _whole(score), "fit-host": _whole(fit_host)},
        "Engines": {
            "lockstep": _whole(lockstep, quiet=False),
            "validate": _whole(validate, dry=cells, json=False),
            "first-light": _whole(first_light, json=False, quiet=False),
        },
        "Op times": {
            "import": _whole(import_profile, json=False, quiet=False),
            "calibrate": _whole(calibrate, json=False, quiet=False),
            "accuracy": _whole(accuracy, quiet=False),
        },
        "The paper": {"reproduce": _whole(reproduce, quiet=False)},
    },
    help="The evidence: each number next to a measured one.",
    add_completion=False,
)
