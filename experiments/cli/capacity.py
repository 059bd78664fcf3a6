"""The commands that answer how much load, on what, and what moves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sarathi_sim.experiments.cli.common import (
    LENGTHS,
    ConfigArgument,
    JsonOption,
    ModelOption,
    QuietOption,
    ResultOption,
    SetOption,
    WorkloadOption,
    consoles,
    finite,
    print_json,
    print_section,
    print_written,
)
from sarathi_sim.experiments.cli.sweep import Where, WorkersOption, backend_at, check_backend

if TYPE_CHECKING:
    from sarathi_sim.experiments.capacity.probing import Laboratory
    from sarathi_sim.experiments.capacity.slo import CapacitySection
    from sarathi_sim.experiments.sweeps.backends import Backend

BackendOption = Annotated[Where, typer.Option(help="Local processes, or a Dask cluster.")]
AddressOption = Annotated[
    str | None, typer.Option(help="Address of the Dask scheduler, such as tcp://127.0.0.1:8786.")
]
PricesOption = Annotated[
    str | None, typer.Option(help="YAML of prices.  [default: shipped assumptions]")
]
RefineOption = Annotated[
    int,
    typer.Option(min=0, max=10, help="Rounds of trying half-way between the best and the next."),
]
PoolsOption = Annotated[
    bool, typer.Option("--pools", help="Also try prefill and decode workers of their own.")
]
MaxLengthOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Longest sequence, tokens.  [default: the longest request, or what the "
        "configuration states]",
    ),
]
SpeculationOption = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD[:ACCEPTANCE]",
        help="Also try drafts by mtp, eagle3 or ngram. ACCEPTANCE: golden (the published one; "
        "default), golden_thinking_off, or the probabilities that the first, second, ... draft "
        "holds, given those before, such as 0.8,0.6.",
    ),
]
DraftsOption = Annotated[
    str | None,
    typer.Option(
        help="Draft lengths to try, with commas; 0: none.  [default: 0,1,2,3, or as many as have a "
        "probability]"
    ),
]
RejectedOption = Annotated[
    float,
    typer.Option(min=0, max=0.99, callback=finite, help="Share of requests that may be rejected."),
]
BandsOption = Annotated[
    bool, typer.Option("--bands/--no-bands", help="Also search under errors of the op times.")
]


@contextmanager
def _laboratory(
    folder: Path, kind: str, section: CapacitySection, where: Backend, quiet: bool
) -> Iterator[Laboratory]:
    """What probes are simulated in, with its folder and a progress bar; it closes the backend."""
    from sarathi_sim.experiments.capacity.probing import laboratory
    from sarathi_sim.experiments.cli.common import ProgressBar

    say = partial(typer.echo, err=True)
    with (
        laboratory(folder, kind, section, where, say=say) as lab,
        ProgressBar(consoles()[1], enabled=not quiet) as lab.progress,
    ):
        yield lab


def capacity(
    config: ConfigArgument,
    assignments: SetOption = None,
    workload: WorkloadOption = None,
    out: ResultOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    workers: WorkersOption = None,
    backend: BackendOption = "local",
    address: AddressOption = None,
    bands: BandsOption = True,
    prices: PricesOption = None,
    refine: RefineOption = 0,
) -> None:
    """Find the highest load that keeps an SLO.

    Every deployment of CONFIG is searched. Its section `capacity` states the SLO, and the space of
    deployments. Finished probes stay in the folder: the same command goes on where it was stopped.
    --workload gives lengths in place of those of CONFIG. --refine tries values of the space that
    lie between the best and its neighbours.

    \b
    Examples:
      sarathi-sim capacity capacity_llama3_70b
      sarathi-sim capacity capacity_llama3_70b --set 'capacity.slo=p99 ttft 1s, p99 tbt 100ms'
      sarathi-sim capacity my.yaml --workload 1024:256 --refine 2
      sarathi-sim capacity my.yaml --out runs/capacity --json | jq '.deployments[].capacity'
    """
    from sarathi_sim.experiments.capacity.answer import (
        answered,
        load_prices,
        read_question,
        result_files,
    )
    from sarathi_sim.experiments.capacity.probing import CAPACITY_FORMAT, write_result
    from sarathi_sim.experiments.capacity.written import capacity_answer

    check_backend(backend, address, workers)
    draft, section, options = read_question(config, assignments or [], workload)
    costs = load_prices(prices)
    folder = out or Path("runs") / draft.header.name
    where = backend_at(backend, address, workers)
    with _laboratory(folder, CAPACITY_FORMAT, section, where, quiet) as lab:
        content = answered(lab, draft, options, bands, costs, refine)
    write_result(folder, CAPACITY_FORMAT, result_files(draft, section, content))
    if json:
        print_json(content)
    if quiet:
        return
    print_section(capacity_answer(content), err=json)
    print_written(folder, figures=True, err=json)


def recommend(
    model: ModelOption,
    device: Annotated[str, typer.Option(help="Devices, separated by commas.")],
    slo: Annotated[str, typer.Option(help="Such as 'p99 ttft 1s, p99 tbt 50ms'.")],
    gpus: Annotated[int | None, typer.Option(min=1, max=1024, help="How many there are.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-3, max=1e6, help="Or: requests a second to be carried.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTHS", help=f"{LENGTHS}  [default: Azure's conversations of 2023]"
        ),
    ] = None,
    max_length: MaxLengthOption = None,
    stack: Annotated[str | None, typer.Option(help="vllm, sglang, trtllm, with commas.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp8, ..., with commas.  [default: the model's]")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Token budgets to try, with commas.")] = None,
    seqs: Annotated[str | None, typer.Option(help="Sequence limits to try, with commas.")] = None,
    prices: PricesOption = None,
    tolerance: Annotated[float, typer.Option(min=0.01, max=0.5, help="Of the capacities.")] = 0.05,
    rejected: RejectedOption = 0.0,
    pools: PoolsOption = False,
    speculation: SpeculationOption = None,
    drafts: DraftsOption = None,
    refine: RefineOption = 0,
    out: Annotated[Path | None, typer.Option(help="[default: runs/recommend]")] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    workers: WorkersOption = None,
    backend: BackendOption = "local",
    address: AddressOption = None,
) -> None:
    """Find the best deployment under an SLO.

    That is the one that carries most on the GPUs, or costs least for a rate. Layouts, token budgets
    and sequence limits are enumerated and bounded; the others race, and the best are searched
    exactly. A mixture's layouts also have ranks with attention of their own (DP). The result has
    the engine's own command line, and a configuration. --pools adds deployments whose prompts and
    decodes have workers of their own, and finds how many of each; --speculation draft lengths.

    \b
    Examples:
      sarathi-sim recommend --model llama-3.3-70b --device h100-80g-sxm --gpus 16 \\
        --stack vllm --slo "p99 ttft 1s, p99 tbt 50ms"
      sarathi-sim recommend --model llama-3.1-8b --device l40s,h100-80g-sxm --rate 20 \\
        --slo "attainment 95% ttft 1s tpot 50ms" --workload 1024:256
      sarathi-sim recommend --model deepseek-r1 --device h200-sxm --gpus 16 --stack sglang \\
        --slo "p99 ttft 2s, p99 tpot 30ms" --pools --speculation mtp:0.8,0.6 --drafts 0,1,2
    """
    from sarathi_sim.experiments.capacity.answer import load_prices
    from sarathi_sim.experiments.capacity.options import wanted_of
    from sarathi_sim.experiments.capacity.probing import RECOMMEND_FORMAT, write_result
    from sarathi_sim.experiments.capacity.recommend import recommend_files, recommended
    from sarathi_sim.experiments.capacity.written import recommend_answer

    check_backend(backend, address, workers)
    wanted = wanted_of(
        *(model, device, slo, gpus, rate, workload, max_length, stack, dtype, budget, seqs),
        *(tolerance, rejected, pools, speculation, drafts),
    )
    costs = load_prices(prices)
    folder, where = out or Path("runs/recommend"), backend_at(backend, address, workers)
    say = (lambda text: None) if quiet else partial(typer.echo, err=True)
    with _laboratory(folder, RECOMMEND_FORMAT, wanted.section, where, quiet) as lab:
        content = recommended(lab, wanted, costs, say, refine)
    write_result(folder, RECOMMEND_FORMAT, recommend_files(wanted, content))
    if json:
        print_json(content)
    if quiet:
        return
    print_section(recommend_answer(content), err=json)
    print_written(folder, figures=True, err=json)


def sensitivity(
    config: ConfigArgument,
    assignments: SetOption = None,
    by: Annotated[float, typer.Option(help="How far each factor is changed: 0.1 is 10 %.")] = 0.1,
    only: Annotated[str | None, typer.Option(help="Some factors, separated by commas.")] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Of a run, such as ttft_s.p99; may be repeated.  [default: the capacity]",
        ),
    ] = None,
    replications: Annotated[
        int, typer.Option(min=1, max=100, help="Runs with seeds of their own.")
    ] = 3,
    out: ResultOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    workers: WorkersOption = None,
    backend: BackendOption = "local",
    address: AddressOption = None,
) -> None:
    """Find what moves the capacity most.

    Each op's time, the links' speed, the host's time, prompt lengths, output lengths and burstiness
    are changed one at a time. Without a section `capacity`, metrics of a run take its place.

    \b
    Examples:
      sarathi-sim sensitivity first_experiment --metric ttft_s.p99
      sarathi-sim sensitivity gpt3_pp --metric makespan_s --metric tbt_s.p99
      sarathi-sim sensitivity capacity_llama3_70b --out runs/sensitivity   # 20 minutes
      sarathi-sim sensitivity my.yaml --by 0.2 --only 'attn_decode,link speed' --json
    """
    from sarathi_sim.experiments.capacity.probing import SENSITIVITY_FORMAT, write_result
    from sarathi_sim.experiments.capacity.sensitivity import read_sensitivity, sensitivity_files
    from sarathi_sim.experiments.capacity.sensitivity import sensitivity as found_by
    from sarathi_sim.experiments.capacity.written import sensitivity_answer

    check_backend(backend, address, workers)
    asked = read_sensitivity(
        config,
        assignments or [],
        by=by,
        replications=replications,
        only=_words(only),
        metrics=metrics or [],
    )
    folder = out or Path("runs") / f"{asked.draft.header.name}_sensitivity"
    where = backend_at(backend, address, workers)
    with _laboratory(folder, SENSITIVITY_FORMAT, asked.section, where, quiet) as lab:
        content = found_by(lab, asked)
    write_result(folder, SENSITIVITY_FORMAT, sensitivity_files(asked, content))
    if json:
        print_json(content)
    if quiet:
        return
    print_section(sensitivity_answer(content), err=json)
    print_written(folder, figures=True, err=json)


def _words(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",") if word.strip()]
