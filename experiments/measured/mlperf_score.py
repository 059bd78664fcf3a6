"""MLPerf's runs predicted: the capacity at their P99 limits, and the latencies at their rate.

Nothing of a run but its settings, its data set and its limits leads to its capacity; its rate only
says where its latencies are simulated. All replicas are simulated behind their router. Requests
come as LoadGen sends them: another load has the same requests and gaps, stretched.

**Constants** of TensorRT's engines are fitted to the runs of other systems: a cell (GPU, number of
GPUs, model) has the medians of the other cells. The errors of their capacities then make its
90 % band: that of op times all slower, and all faster, by 1.64 standard deviations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from sarathi_sim.experiments.capacity.options import Option, arrivals_at, pooled, slowed
from sarathi_sim.experiments.capacity.probing import Laboratory
from sarathi_sim.experiments.capacity.search import (
    Crossing,
    Probe,
    Probed,
    Search,
    SearchPlan,
    UnbreakableError,
    crossing,
    kept_at,
    pilot,
)
from sarathi_sim.experiments.capacity.slo import CapacitySection
from sarathi_sim.experiments.config.base import Source
from sarathi_sim.experiments.config.deployment import Deployment, deploy
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.measured.mlperf import (
    SLOWER,
    MlperfHost,
    MlperfRun,
    mlperf_host,
    read_mlperf,
    requests_of,
    scenario_of,
)
from sarathi_sim.experiments.measured.row_runs import NORMAL_90, kept_runs
from sarathi_sim.experiments.sweeps.backends import Backend
from sarathi_sim.experiments.sweeps.plan import SharedRequests
from sarathi_sim.experiments.sweeps.store import Store
from sarathi_sim.profiler.facts.ops import ALL_REDUCE, OPS
from sarathi_sim.profiler.kernels.borrowed import LENT_PCT
from sarathi_sim.profiler.storage.child import Progress, Say
from sarathi_sim.profiler.storage.files import write_whole
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml
from sarathi_sim.profiler.storage.strict import UserError

T = TypeVar("T")
LATENCIES = {
    f"{metric}_ms_{statistic}": (f"{metric}_s", statistic)
    for metric in ("ttft", "tpot")
    for statistic in ("mean", "p99")
}
"""The scored latencies, with their places in a run's summary."""
CAPACITY = "capacity_per_s"
A_REPLICA, OF_PILOT = 20_000, 2_000
"""Requests of a run, and of a pilot, for each replica; at most the run's own."""
TOLERANCE = 0.01
TRIED_S = (0.004, 0.008)
"""Host times of an iteration at which a fit simulates; between and beside them it is linear."""
TRIED_FACTORS = (0.5, 1.0)
"""The same of the factor on messages."""
SETTLED = 0.92
"""A run's share of Offline up to which its time per output token says something of the host: near
saturation it says how far saturation is."""
BOUND = 0.9
"""A run whose P99 is at this share of a limit stopped there."""
WITHIN = (0.95, 1.10)
"""A capacity that is right for a run that stopped at a limit, over its rate."""
BRACKET = (0.97, 1.05)
"""For other runs: the least capacity over the rate, and the largest over Offline."""


@dataclass(frozen=True)
class Banded:
    """A predicted number with its 90 % band."""

    value: float
    low: float
    high: float


def between(ends: Iterable[float]) -> Banded:
    """The first number, in a band that holds all of them."""
    found = list(ends)
    return Banded(found[0], min(found), max(found))


@dataclass(frozen=True)
class PredictedRun:
    """The predictions for a run by column, and the limit that the capacity meets first."""

    numbers: Mapping[str, Banded]
    binds: str

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return self.numbers[CAPACITY].value


@dataclass(frozen=True, eq=False)
class LoadGenOption(Option):
    """The system of a run."""

    def at(self, probe: Probe, load: str) -> Deployment:
        """All replicas, with the first requests of the run, sent faster or slower."""
        arrivals = arrivals_at(self.scenario, probe.load, load, self.natural_rate)
        scenario = self.scenario.having("workload", requests=probe.requests, arrivals=arrivals)
        if probe.slower != 1:
            scenario = slowed(scenario, OPS, probe.slower)
        return replace(self.deployment, scenario=scenario)

    @cached_property
    def alike(self) -> int:
        """No replica stands for another."""
        return 1

    def having(self, host_s: float, all_reduce: float) -> LoadGenOption:
        """The same with another host time of an iteration, and factor on all-reduces."""
        scale = self.scenario.engine.op_scale | {ALL_REDUCE: all_reduce}
        scenario = self.scenario.having("engine", host_iteration_s=host_s, op_scale=scale)
        return replace(self, deployment=replace(self.deployment, scenario=scenario))


@dataclass(frozen=True)
class ScoredMlperf:
    """Runs, with predictions or reasons for none by id; ``host`` has the constants (``fitted``
    here, or shipped)."""

    runs: Sequence[MlperfRun]
    best: Mapping[str, PredictedRun]
    refused: Mapping[str, str]
    host: MlperfHost
    fitted: bool = False

    def content(self) -> dict[str, Any]:
        """As ``score --json`` prints it."""
        best = self.best
        answered = [run for run in self.runs if run.id in best]
        stopped = [run for run in answered if run.stress >= BOUND]
        others = [run for run in answered if run.stress < BOUND]
        inside = [
            estimate.low <= value <= estimate.high
            for run in answered
            for key, estimate in best[run.id].numbers.items()
            if (value := getattr(run, key, None)) is not None
        ]
        return {
            "mlperf": {
                "rows": len({run.id for run in self.runs} | self.refused.keys()),
                "answered": len(best),
                "stopped_at_a_limit": {
                    "rows": len(stopped),
                    "within": sum(_right(run, best[run.id].capacity) for run in stopped),
                    "same_limit": sum(best[run.id].binds == run.binds for run in stopped),
                },
                "proven": {
                    "rows": len(others),
                    "within": sum(_right(run, best[run.id].capacity) for run in others),
                },
                "latencies": {
                    name: of
                    for name, which in _groups(answered).items()
                    if (of := {key: _errors(which, best, key) for key in LATENCIES}) and which
                },
                "in_band_pct": 100 * float(np.mean(inside)) if inside else None,
            },
            "runs": {run.id: self._line(run) for run in answered},
            "refused": dict(self.refused),
            "host": asdict(self.host) if self.fitted else {},
        }

    def _line(self, run: MlperfRun) -> dict[str, Any]:
        found = self.best[run.id]
        return {
            "cell": run.cell,
            "scenario": run.scenario,
            "rate": run.rate,
            "offline": run.offline_samples_per_s,
            "stress": run.stress,
            "limit": run.binds,
            "binds": found.binds,
            "right": _right(run, found.capacity),
            "measured": {key: getattr(run, key) for key in LATENCIES},
            "predicted": {
                key: [each.value, each.low, each.high] for key, each in found.numbers.items()
            },
        }

    def write(self, folder: Path) -> None:
        """``predictions.csv``, and the constants if they were fitted."""
        columns = [CAPACITY, *LATENCIES]
        lines = []
        for id in dict.fromkeys([*(run.id for run in self.runs), *self.refused]):
            line: dict[str, Any] = {"id": id}
            for key in columns:
                each = self.best[id].numbers[key] if id in self.best else _NOTHING
                line |= {key: each.value, f"{key}_low": each.low, f"{key}_high": each.high}
            line["reason"] = " ".join(self.refused.get(id, "").split())
            lines.append(line)
        pd.DataFrame(lines).to_csv(folder / "predictions.csv", index=False, float_format="%.6g")
        if self.fitted:
            write_whole(folder / "mlperf_host.yaml", dump_yaml(asdict(self.host)).encode())


_NOTHING = Banded(np.nan, np.nan, np.nan)


def _right(run: MlperfRun, capacity: float) -> bool:
    if run.stress >= BOUND:
        return WITHIN[0] * run.rate <= capacity <= WITHIN[1] * run.rate
    return BRACKET[0] * run.rate <= capacity <= BRACKET[1] * run.offline_samples_per_s


def _groups(runs: Iterable[MlperfRun]) -> dict[str, list[MlperfRun]]:
    """The runs whose latencies are scored together; Llama-3.1-8B is a judge of the host."""
    found: dict[str, list[MlperfRun]] = {"all but 8B": [], "Interactive": [], "Llama-3.1-8B": []}
    for run in runs:
        small = run.model == "llama3.1-8b"
        found["Llama-3.1-8B" if small else "all but 8B"].append(run)
        if not small and run.scenario == "Interactive":
            found["Interactive"].append(run)
    return found


def _errors(
    runs: Iterable[MlperfRun], best: Mapping[str, PredictedRun], key: str
) -> dict[str, float]:
    off = [100 * (best[run.id].numbers[key].value / getattr(run, key) - 1) for run in runs]
    return {
        "rows": len(off),
        "mape": float(np.mean(np.abs(off))) if off else np.nan,
        "bias": float(np.mean(off)) if off else np.nan,
    }


# Simulation -------------------------------------------------------------------------------------


def score_mlperf(
    files: Sequence[Path],
    lengths: Path,
    backend: Backend,
    progress: Progress,
    say: Say,
    *,
    fit: bool = False,
) -> ScoredMlperf:
    """Predict the runs of tables; with ``fit`` each cell with constants of these tables' others.

    Raises UserError for a file that is no such table, and for an id that is in two of them.
    """
    runs: list[MlperfRun] = []
    refused: dict[str, str] = {}
    for path in files:
        read, unread = read_mlperf(path)
        if again := {run.id for run in runs} & {run.id for run in read}:
            raise UserError(f"{path}: the id {min(again)} is in an earlier file, too")
        runs, refused = [*runs, *read], refused | unread
    with kept_runs() as (store, _):
        samples = store.folder.parent / "mlperf"
        bench = _Bench(store, backend, progress, say, lengths, samples, runs)
        options = bench.options(runs, refused)
        host = bench.fitted(options) if fit else mlperf_host()
        systems = bench.systems(options, host)
        best = bench.predicted(systems, refused)
        if fit:
            host = replace(host, errors=errors_of_cells(best, runs))
        best = bench.banded(systems, best, host)
    return ScoredMlperf(runs, best, refused, host, fit)


def errors_of_cells(
    best: Mapping[str, PredictedRun], runs: Iterable[MlperfRun]
) -> dict[str, float]:
    """By cell, the root mean square of the logarithm of predicted over measured capacity: the rate
    of a run that stopped at a limit; of others the nearer end from rate to Offline."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run.id in best:
            capacity = best[run.id].capacity
            most = run.rate if run.stress >= BOUND else max(run.offline_samples_per_s, run.rate)
            known = min(max(capacity, run.rate), most)
            found.setdefault(run.cell, []).append(float(np.log(capacity / known)))
    return {cell: float(np.sqrt(np.mean(np.square(off)))) for cell, off in found.items()}


@dataclass
class _Bench:
    """Simulations of runs; those with equal settings, rate and data set share theirs."""

    store: Store
    backend: Backend
    progress: Progress
    say: Say
    lengths: Path
    traces: Path
    runs: Sequence[MlperfRun]
    requests_of: SharedRequests = field(default_factory=SharedRequests)

    def options(
        self, runs: Iterable[MlperfRun], refused: dict[str, str]
    ) -> dict[str, LoadGenOption]:
        """The systems by id; the reasons for none are added to ``refused``."""
        found: dict[str, LoadGenOption] = {}
        alike: dict[str, LoadGenOption] = {}
        for number, run in enumerate(list(runs)):
            self.progress("checking", number, len(self.runs))
            source = Source("mlperf", run.id, {}, ())
            try:
                tree = scenario_of(run, self._trace(run))
                if (key := repr(tree)) not in alike:
                    deployment = deploy(check_scenario(tree, source), source, self.requests_of)
                    alike[key] = LoadGenOption(run.id, {}, deployment)
                found[run.id] = alike[key]
            except UserError as error:
                refused[run.id] = str(error).removeprefix("mlperf: ")
        return found

    def _trace(self, run: MlperfRun) -> Path:
        """The requests of a run, in a file that is named by what they depend on. All runs of a
        benchmark in a number format have their mean output: it differs by 1 %."""
        alike = [
            other.output_tokens_mean
            for other in self.runs
            if (other.model, other.measurement_weight_type)
            == (run.model, run.measurement_weight_type)
        ]
        count = min(run.n_queries, A_REPLICA * run.replicas)
        run = run.model_copy(
            update={"n_queries": count, "output_tokens_mean": round(float(np.mean(alike)), 2)}
        )
        what = (run.model, run.measurement_weight_type, count, run.target_rate_per_s)
        text = repr((*what, run.output_tokens_mean, run.schedule_rng_seed, str(self.lengths)))
        path = self.traces / f"{run.model}_{sha256(text.encode()).hexdigest()[:12]}.csv"
        if not path.is_file():
            found = requests_of(run, self.lengths)
            columns = ("arrival_s", "prompt_tokens", "output_tokens")
            values = (found.arrival_s, found.prompt, found.output)
            table = pd.DataFrame(dict(zip(columns, values, strict=True)))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, table.to_csv(index=False).encode())
        return path

    def fitted(self, options: Mapping[str, LoadGenOption]) -> MlperfHost:
        """The factor on messages with which the mean time to first token is right, then the host's
        time with which the mean time per output token is, by cell. Runs near saturation tell
        neither."""
        told = [
            run
            for run in self.runs
            if run.id in options
            and run.in_engine
            and run.rate <= SETTLED * run.offline_samples_per_s
        ]
        messages = self._solved(
            [run for run in told if (run.tp or 1) > 1],
            options,
            TRIED_FACTORS,
            lambda option, run, factor: option.having(np.mean(TRIED_S).item(), factor),
            "ttft_ms_mean",
        )
        host = MlperfHost("", {}, messages, {})
        found = self._solved(
            told,
            options,
            TRIED_S,
            lambda option, run, host_s: option.having(host_s, host.without(run.cell)[1]),
            "tpot_ms_mean",
        )
        gpus = ", ".join(sorted({run.gpu for run in told}))
        return replace(host, host_iteration_s=found, fitted_to=f"{len(told)} runs on {gpus}")

    def _solved(
        self,
        runs: Sequence[MlperfRun],
        options: Mapping[str, LoadGenOption],
        tried: tuple[float, float],
        having: Callable[[LoadGenOption, MlperfRun, float], LoadGenOption],
        key: str,
    ) -> dict[str, float]:
        """The constant with which a latency is right, on the line through two tried ones; the
        median of a cell's runs."""
        systems: dict[tuple[LoadGenOption, float], LoadGenOption] = {}
        plans = {}
        for run in runs:
            for value in tried:
                at = options[run.id], value
                if at not in systems:
                    systems[at] = having(options[run.id], run, value)
                    plans[systems[at]] = plan_of(run)
        found = self._pursue(plans, {one: _at_rate(one, plan) for one, plan in plans.items()})
        of_cell: dict[str, list[float]] = {}
        for run in runs:
            ends = [found[systems[options[run.id], value]] for value in tried]
            low, high = (each if isinstance(each, str) else each[0][key] for each in ends)
            if not isinstance(low, str) and not isinstance(high, str):
                part = (getattr(run, key) - low) / (high - low)
                value = tried[0] + part * (tried[1] - tried[0])
                of_cell.setdefault(run.cell, []).append(max(value, 0.1 * tried[0]))
        return {cell: float(np.median(each)) for cell, each in of_cell.items()}

    def systems(
        self, options: Mapping[str, LoadGenOption], host: MlperfHost
    ) -> dict[str, LoadGenOption]:
        """The systems by id, with the constants of other cells."""
        known = {run.id: run for run in self.runs}
        shared: dict[tuple[LoadGenOption, str], LoadGenOption] = {}
        for id, option in options.items():
            if (at := (option, known[id].cell)) not in shared:
                of = option.having(*host.without(known[id].cell)) if known[id].in_engine else option
                shared[at] = of
        return {id: shared[option, known[id].cell] for id, option in options.items()}

    def predicted(
        self, systems: Mapping[str, LoadGenOption], refused: dict[str, str]
    ) -> dict[str, PredictedRun]:
        """The predictions by id, without bands; failures are added to ``refused``."""
        known = {run.id: run for run in self.runs}
        plans = {option: plan_of(known[id]) for id, option in systems.items()}
        found = self._pursue(plans, {one: _predicted(one, plan) for one, plan in plans.items()})
        best = {}
        for id, option in systems.items():
            if isinstance(one := found[option], str):
                refused[id] = one
            else:
                best[id] = one
        return best

    def banded(
        self,
        systems: Mapping[str, LoadGenOption],
        best: Mapping[str, PredictedRun],
        host: MlperfHost,
    ) -> dict[str, PredictedRun]:
        """The predictions with bands: all op times slower, and faster, by the others' error."""
        plans: dict[LoadGenOption, SearchPlan] = {}
        factors: dict[LoadGenOption, list[float]] = {}
        for run in self.runs:
            if run.id in best:
                option = systems[run.id]
                off = NORMAL_90 * host.error_without(run.cell)
                off = np.hypot(off, np.log1p(LENT_PCT["gemm"] / 100) if run.gpu in SLOWER else 0)
                plans[option], factors[option] = plan_of(run), np.exp([off, -off]).tolist()
        searches = {one: _at_rate(one, plan, factors[one]) for one, plan in plans.items()}
        found = self._pursue(plans, searches)
        banded = {}
        for id, one in best.items():
            option = systems[id]
            if isinstance(at := found[option], str):
                continue
            numbers = {key: between(each[key] for each in at) for key in LATENCIES}
            load = one.capacity
            ends = [load, *(load / factor for factor in factors[option])]
            banded[id] = replace(one, numbers={**numbers, CAPACITY: between(ends)})
        return banded

    def _pursue(
        self, plans: Mapping[LoadGenOption, SearchPlan], searches: Mapping[LoadGenOption, Search[T]]
    ) -> dict[LoadGenOption, T | str]:
        """Searches of all systems; those with the same limits at a time."""
        by_limits: dict[str, dict[LoadGenOption, Search[T]]] = {}
        for option, search in searches.items():
            by_limits.setdefault(_section_of(plans[option]).slo, {})[option] = search
        found: dict[LoadGenOption, T | str] = {}
        for group in by_limits.values():
            section = _section_of(plans[next(iter(group))])
            lab = Laboratory(section, self.store, self.backend, self.progress, self.say)
            answered = lab.pursue(group, len(found), len(searches))  # type: ignore[arg-type]
            found |= answered  # type: ignore[arg-type]
        return found


def _section_of(plan: SearchPlan) -> CapacitySection:
    judged: partial[Any] = plan.pooled  # type: ignore[assignment]
    section: CapacitySection = judged.args[0]
    return section


def plan_of(run: MlperfRun) -> SearchPlan:
    """How a run's capacity is searched: one schedule, LoadGen's."""
    limits = f"p99 ttft {run.ttft_limit_ms:g}ms, p99 tpot {run.tpot_limit_ms:g}ms"
    section = CapacitySection(slo=limits, tolerance=TOLERANCE)
    requests = min(run.n_queries, A_REPLICA * run.replicas)
    return SearchPlan(
        TOLERANCE,
        least=2,
        most=2,
        requests=requests,
        pilot_requests=min(requests, OF_PILOT * run.replicas),
        seed=0,
        pooled=partial(pooled, section),
        limit_s=run.ttft_limit_ms / 1e3,
        budget=requests,
    )


def _at_rate(
    option: LoadGenOption, plan: SearchPlan, factors: Sequence[float] = ()
) -> Search[list[dict[str, float]]]:
    """The latencies at the run's own rate, in ms by column: as predicted, and with op times that
    are so many times as long."""
    rate = option.natural_rate
    at = yield [Probe(rate, plan.seed, plan.requests, slower) for slower in (1.0, *factors)]
    return [_latencies(probed) for probed in at]


def _latencies(probed: Probed) -> dict[str, float]:
    summary = probed.summary
    return {key: 1e3 * float(summary[m][statistic]) for key, (m, statistic) in LATENCIES.items()}


def _predicted(option: LoadGenOption, plan: SearchPlan) -> Search[PredictedRun]:
    _, rough = yield from pilot(plan)
    found: Crossing | Probed = rough
    if isinstance(rough, Crossing):
        like = Probe(0, plan.seed, plan.requests)
        found = yield from crossing(like, rough.load, rough.slope, plan)
    if not isinstance(rough, Crossing) or not isinstance(found, Crossing):
        raise UnbreakableError("no load keeps the limits")
    (at,) = yield from _at_rate(option, plan)
    numbers = {key: between([value]) for key, value in at.items()}
    load, _, verdict = yield from kept_at(plan, found.load, [found])  # it is run before it is said
    numbers[CAPACITY] = between([load if verdict.holds else found.kept.probe.load])
    stresses = found.broken.verdict.stresses
    worst = max(stresses, key=lambda text: stresses[text])
    return PredictedRun(numbers, "ttft" if "ttft" in worst else "tpot")
