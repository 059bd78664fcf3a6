"""The command ``capacity``: from a file to capacities in numbers, with costs, and to files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from sarathi_sim.profiler.storage.files import data_dir, user_path
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml, read_mapping
from sarathi_sim.profiler.storage.strict import STRICT, UserError, did_you_mean, parse
from sarathi_sim.simulator.views.metrics import Analysis
from ..config.assumptions import assumed
from ..config.base import Assignments, Config, Source
from ..config.deployment import deploy
from ..config.loading import Draft, read_draft
from ..config.scenario import POOLS
from ..results import SUMMARY, json_bytes
from ..run.traffic import with_workload
from ..run.uncertainty import capacity_error, capacity_interval, op_factors
from ..sweeps.points import between, in_order
from .options import Option, option_at, options_of, plan_of
from .probing import CAPACITY_FORMAT, Laboratory
from .search import (
    AT_ONCE,
    Capacity,
    Crossing,
    Probe,
    Probed,
    Search,
    SearchPlan,
    capacity,
    crossing,
)
from .slo import OVERLOAD, REJECTED, CapacitySection, Verdict

FINE = 0.005
"""The tolerance of searches for a band, which is a few percent wide."""
FULL, MANY_BUBBLES, MOSTLY = 0.97, 0.1, 0.5
"""Shares from which on a resource binds: of the KV cache, of the stages' time, of a latency."""


@dataclass(frozen=True)
class Answer:
    """The capacity of one deployment. ``band`` is the capacity with op times slower, and faster, by
    their joint 90 % band (None: not asked for). ``error`` says why there is no capacity."""

    option: Option
    found: Capacity | None
    band: tuple[float, float] | None = None
    error: str = ""

    @classmethod
    def of(
        cls, option: Option, found: Capacity | str, band: tuple[float, float] | None = None
    ) -> Answer:
        """The answer of a search that ended with a capacity, or with an error."""
        if isinstance(found, str):
            return cls(option, None, None, found)
        return cls(option, found, band)

    @property
    def load(self) -> float:
        """The carried load; 0 if it is nothing, or not known."""
        return self.found.carried if self.found is not None else 0.0

    @property
    def unsettled(self) -> str:
        """Why the carried load is not known; empty if it is."""
        return self.error if self.found is None else self.found.unsettled

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the carried load by sampling alone."""
        assert self.found is not None
        low, high = ((1 - self.found.rejected) * bound for bound in self.found.interval)
        return low, high

    @property
    def uncertainty(self) -> tuple[float, float] | None:
        """The 90 % interval of the carried load (:func:`capacity_interval`) by sampling, op times
        if their ``band`` is known, and the error of predicted capacities; None without a load."""
        if not self.load:
            return None
        kind = "dense" if self.option.deployment.model.experts is None else "mixture"
        error, bands = capacity_error().half_width[kind], [self.band] if self.band else []
        return capacity_interval(self.load, error, self.interval, *bands)


def answers(lab: Laboratory, options: list[Option], where: str, bands: bool = True) -> list[Answer]:
    """The capacity of every option, in order. Raises UserError if runs are too short."""
    plans = {option: plan_of(option, lab.section, where) for option in options}
    found = lab.pursue({option: capacity(plans[option]) for option in options})
    known = {option: one for option, one in found.items() if isinstance(one, Capacity)}
    spreads = banded(lab, plans, known) if bands else {}
    return [Answer.of(one, found[one], spreads.get(one)) for one in options]


def banded(
    lab: Laboratory, plans: Mapping[Option, SearchPlan], found: Mapping[Option, Capacity]
) -> dict[Option, tuple[float, float]]:
    """Each capacity if all ops were slower, or faster, by the joint 90 % band of their errors in a
    saturated run (:func:`slower_factors`). Pilots with these op times and with the profile's have
    the same random numbers; the ratio of their loads scales the capacity."""
    searches = {}
    for number, (option, one) in enumerate(found.items()):
        lab.progress("errors of op times", number, len(found))
        if isinstance(one.pilot, Crossing):
            slower = slower_factors(option, plans[option], one.pilot.broken.probe)
            searches[option] = _scaled_pilots(plans[option], one.pilot, slower)
    lab.progress("errors of op times", len(found), len(found))
    return {
        option: (low * found[option].carried, high * found[option].carried)
        for option, ratios in lab.pursue(searches).items()
        if not isinstance(ratios, str)
        for low, high in [ratios]
    }


def slower_factors(option: Option, plan: SearchPlan, loaded: Probe | None = None) -> list[float]:
    """Quantiles of the factor by which op errors lengthen a saturated, or a ``loaded`` probe's
    run."""
    probe, kind = Probe(AT_ONCE, plan.seed, plan.pilot_requests), "rate"
    if plan.whole and loaded is not None:
        probe, kind = loaded, "clients"
    where = Source("capacity", option.name, {}, ())
    deployment = deploy(option.at(probe, kind).scenario, where)  # with the probe's own requests
    return op_factors(deployment, Analysis(deployment.simulate()))


def _scaled_pilots(
    plan: SearchPlan, rough: Crossing, factors: list[float]
) -> Search[tuple[float, float]]:
    if not factors:
        return 1.0, 1.0
    loads, plan = [], replace(plan, tolerance=min(plan.tolerance, FINE))
    for slower in (1.0, *reversed(factors)):
        like = Probe(0, plan.seed, plan.pilot_requests, slower)
        there = yield from crossing(like, rough.load / slower, rough.slope, plan)
        loads.append(there.load if isinstance(there, Crossing) else 0.0)
    base = loads[0] or rough.load
    return loads[1] / base, loads[-1] / base


def binding(answer: Answer) -> dict[str, Any]:
    """The clause that breaks when the load rises (``slo``) in most replications, with numbers of a
    probe just above a crossing, and the cause (``because``): memory, bubbles, queueing, too long,
    with two pools slot (of a decode worker) and transfer, or the iterations themselves. Shares of
    the slot are at P99: of the time to first token, and of a prefill worker's service (from the
    first chunk until the KV is sent)."""
    found = answer.found
    if found is None:
        return {}
    if found.crossings:
        above = [one.broken for one in found.crossings if not one.broken.verdict.holds]
        worst = Counter(probed.verdict.worst for probed in above).most_common(1)[0][0]
        alike = (probed for probed in above if probed.verdict.worst == worst)
        broken = min(alike, key=lambda probed: probed.verdict.stress)
    else:
        assert found.pilot is not None
        broken = found.pilot.broken if isinstance(found.pilot, Crossing) else found.pilot
    summary, after = broken.summary, broken.summary["after_warmup"]
    ttft = float(after["ttft_s"]["p99"])
    evidence = {
        "kv_peak_share": summary["kv_peak_share"],
        "preemption_rate": summary.get("preemption_rate"),
        "bubble_share": summary["bubble_share"],
        "queueing_share_of_ttft": after["queueing_s"]["p99"] / ttft,
    }
    if "slot_s" in after:
        names = ("prefill_s", "slot_s", "transfer_s")
        prefill, slot, transfer = (float(after[name]["p99"]) for name in names)
        evidence["slot_share_of_ttft"] = slot / ttft
        evidence["transfer_share_of_ttft"] = transfer / ttft
        evidence["slot_share_of_service"] = slot / (prefill + slot + transfer)
    evidence |= {key: summary[key] for key in ("mean_batch", "mfu")}
    why = {"slo": broken.verdict.worst, "because": _cause(broken, evidence)}
    return {**why, "at_load": broken.probe.load, **evidence}


def _cause(broken: Probed, evidence: Mapping[str, Any]) -> str:
    if broken.verdict.worst == REJECTED:
        return "too long"
    waits = broken.verdict.worst == OVERLOAD or any(
        word in broken.verdict.worst for word in ("ttft", "latency", "e2e", "attainment")
    )
    if waits and "slot_share_of_ttft" in evidence:
        # A full decode pool fills the prefill pool, so that requests queue there, too.
        backed_up = evidence["kv_peak_share"] >= FULL
        of_ttft = "slot_share_of_service" if backed_up else "slot_share_of_ttft"
        for cause, key in (("slot", of_ttft), ("transfer", "transfer_share_of_ttft")):
            if evidence[key] >= MOSTLY:
                return cause
    if evidence["preemption_rate"] or (evidence["kv_peak_share"] >= FULL and waits):
        return "memory"
    if evidence["bubble_share"] >= MANY_BUBBLES:
        return "bubbles"
    if waits and (broken.verdict.overloaded or evidence["queueing_share_of_ttft"] >= MOSTLY):
        return "queueing"
    return "iterations"


def said_of(options: Iterable[Option], load: str | None) -> dict[str, dict[str, list[str]]]:
    """By option: its ``notes``, the assumptions under the searched kind of ``load`` (None: under
    its own load), and its ``doubts``."""
    each = {option.name: option.deployment for option in options}
    settings = [one.scenario.policy.model_dump() for one in each.values()]
    values = [(key, value) for one in settings for key, value in one.items()]
    varied = {key for key, one in values if any(key == k and one != v for k, v in values)}
    return {
        "notes": {name: assumed(one, load, varied) for name, one in each.items()},
        "doubts": {name: list(one.doubts) for name, one in each.items() if one.doubts},
    }


def as_json(answer: Answer, kind: str) -> dict[str, Any]:
    """One deployment's answer in numbers; ``kind`` of load: rate or clients. ``capacity`` is the
    carried load: the load ``offered`` less the ``rejected_share``. Without an error ``settled``
    says whether it is known, and ``why_not`` why it is not."""
    option, found = answer.option, answer.found
    cluster, pools = option.scenario.cluster, option.deployment.pools
    about: dict[str, Any] = {
        "name": option.name,
        "point": option.point,
        "policy": pools[-1].scenario.policy.name,
        "device": " and ".join(option.deployment.gpus),
        "stack": pools[-1].scenario.stack,
        "tp": cluster.tp,
        "pp": cluster.pp,
        "dp": cluster.dp,
        "drafts": option.drafts,
        "replicas": cluster.replicas,
        "gpus": option.gpus,
        "settled": not answer.unsettled,
    }
    if len(pools) > 1:
        clusters = {name: one.scenario.cluster for name, one in zip(POOLS, pools, strict=True)}
        about |= {"tp": None, "pp": None, "dp": None, "replicas": 1}
        about["pools"] = {
            name: one.model_dump(include={"tp", "pp", "dp", "replicas"})
            | {"gpus": one.gpus * one.replicas}
            for name, one in clusters.items()
        }
    if found is None:
        return {**about, "capacity": None, "error": answer.error}
    at = pooled_numbers(found.at, found.verdict, option) if found.verdict is not None else None
    return {
        **about,
        "capacity": None if found.unsettled else found.carried,
        "offered": None if found.unsettled else found.load,
        "rejected_share": found.rejected,
        "rejected_because": option.deployment.refused[1],
        "why_not": found.unsettled,
        "interval": list(answer.interval),
        "band": None if answer.band is None else list(answer.band),
        "uncertainty": answer.uncertainty and list(answer.uncertainty),
        "spread_of_a_run": found.spread if found.crossings else None,
        "replications": [one.load for one in found.crossings],
        "simulated_replicas": about["replicas"] // (option.alike if kind == "rate" else 1),
        "saturation": found.saturation if math.isfinite(found.saturation) else None,
        "binds": binding(answer),
        "at_capacity": at,
        "curve": [at if p.probe.load == found.load else numbers(p, option) for p in curve(found)],
        "scenario": None if at is None else scenario_at(option, at, kind),
    }


def scenario_at(option: Option, at: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The configuration of all replicas at a load, to simulate it again: with as many requests per
    replica as the pooled numbers ``at`` that load."""
    under = option.under(at["load"], kind)
    under = under.having("workload", requests=at["requests_of_all"])
    return under.model_dump(mode="json", exclude_none=True)


def curve(found: Capacity) -> list[Probed]:
    """All probes of the headroom curve, by load: the single probes, and a probe at the capacity."""
    probes = {probed.probe.load: probed for probed in found.curve}
    if found.at:
        probes[found.load] = found.at[0]
    if not probes and isinstance(found.pilot, Probed):
        probes[found.pilot.probe.load] = found.pilot
    return [probes[load] for load in sorted(probes) if load != AT_ONCE]


def numbers(probed: Probed, option: Option) -> dict[str, Any]:
    """A probe's load, values, and throughput per user and per GPU. ``input_tokens_per_s`` (prompts,
    those found in a cache too) and ``output_tokens_per_s`` are the rates of all replicas: a closed
    loop's own, else as if every accepted request is served, which takes longer than arrivals."""
    summary, after, probe = probed.summary, probed.summary["after_warmup"], probed.probe
    tpot, served = after["tpot_s"]["p50"], probed.scale * summary["requests_per_s"]
    output = summary["output_tokens_per_s"]
    tokens = [probed.scale * each for each in (summary["tokens_per_s"] - output, output)]
    clients = option.scenario.workload.arrivals.kind == "closed_loop"
    if not clients and served and math.isfinite(probe.load):
        part = probe.load * (1 - probed.verdict.rejected) / served
        tokens = [part * each for each in tokens]
    return {
        "run": probed.run,
        "load": probe.load,
        "requests": probe.requests,
        **_judged(probed.verdict),
        "ttft_p99_s": after["ttft_s"]["p99"],
        "tbt_p99_s": after["tbt_s"]["p99"],
        "tokens_per_s_per_user": 1 / tpot if tpot else float("nan"),
        "requests_per_s": served,
        "input_tokens_per_s": tokens[0],
        "output_tokens_per_s": tokens[1],
        "output_tokens_per_s_per_gpu": tokens[1] / option.gpus,
    }


def _judged(verdict: Verdict) -> dict[str, Any]:
    return {
        "holds": verdict.holds,
        "overloaded": verdict.overloaded,
        "rejected_share": verdict.rejected,
        "slo": verdict.values,
        "stress": verdict.stresses,
    }


def pooled_numbers(at: Sequence[Probed], verdict: Verdict, option: Option) -> dict[str, Any]:
    """The numbers of replications at one load: SLO values pooled, the other numbers as means;
    ``runs`` names the replications, ``requests_of_all`` is the requests of one on all replicas."""
    each, judged = [numbers(probed, option) for probed in at], _judged(verdict)
    means = {
        key: float(np.mean([one[key] for one in each]))
        for key, value in each[0].items()
        if value is not None and key not in (*judged, "run", "load", "requests")
    }
    runs, requests = [probed.run for probed in at], at[0].probe.requests * at[0].scale
    return {**each[0], **judged, **means, "runs": runs, "requests_of_all": requests}


@dataclass(frozen=True)
class Prices:
    """``gpu_hour``: the cost of an hour of one GPU, by device, as of ``date``. ``mark`` is the
    origin of the prices: ``assumed`` or ``given``."""

    __pydantic_config__: ClassVar = STRICT

    date: str
    gpu_hour: dict[str, Annotated[float, Field(ge=0, le=1e6)]]
    currency: str = "USD"
    mark: Literal["assumed", "given"] = "given"

    @property
    def stated(self) -> dict[str, str]:
        """The origin of the prices, for results."""
        return {"date": self.date, "currency": self.currency, "mark": self.mark}

    def of(self, device: str) -> float:
        """The price of an hour of one GPU. Raises UserError if it is not known."""
        if device not in self.gpu_hour:
            raise UserError(
                f"prices: gpu_hour.{device}: this key is missing"
                f"{did_you_mean(device, self.gpu_hour)}: give prices with it"
            )
        return self.gpu_hour[device]


def load_prices(path: str | None) -> Prices:
    """The user's prices, or the shipped ones. Raises UserError, a line per mistake."""
    file: Path = data_dir() / "prices.yaml" if path is None else user_path(path)
    return parse(Prices, read_mapping(file), file)


def per_million_tokens(gpu_hour: float, gpus: int, tokens_per_s: float) -> float:
    """The cost of a million tokens at a throughput."""
    return gpu_hour * gpus / 3600 / tokens_per_s * 1e6 if tokens_per_s else float("inf")


COSTS = {f"per_million_{what}_tokens": f"{what}_tokens_per_s" for what in ("input", "output")}
"""Each cost of a deployment at a load, and the throughput by which its price an hour is divided."""


def add_costs(row: dict[str, Any], per_hour: float) -> None:
    """Add the cost per hour to a deployment, and the costs of a million input and of a million
    output tokens to it and each of its probes. The deployment's tokens cost as at the rate that was
    asked for, or at its capacity; None if it does not sustain the rate."""
    row["per_hour"], at, asked = per_hour, row.get("at_capacity"), row.get("at_rate")
    for probe in (*row.get("curve", ()), *filter(None, (at, asked))):
        for cost, rate in COSTS.items():
            probe[cost] = per_million_tokens(per_hour, 1, probe[rate])
    there = (asked or at) if at and row["settled"] and row["capacity"] else None
    row |= {cost: there[cost] if there else None for cost in COSTS}


def read_question(
    config: Config, assignments: Assignments, workload: str | None = None
) -> tuple[Draft, CapacitySection, list[Option]]:
    """A file with a ``capacity`` section, and its deployments, checked; ``workload`` gives lengths
    in place of its own (:func:`with_workload`). Raises UserError."""
    draft = with_workload(read_draft(config, assignments), workload)
    raw = draft.header.capacity
    if raw is None:
        raise UserError(
            f"{draft.source.file}: capacity: this section is missing: it states the SLO, as in "
            "capacity: {slo: 'p99 ttft 1s, p99 tbt 50ms'}"
        )
    section = draft.source.checked(CapacitySection, raw, "capacity")
    return draft, section, options_of(draft, section)


def answered(
    lab: Laboratory,
    draft: Draft,
    options: list[Option],
    bands: bool,
    prices: Prices,
    refine: int = 0,
) -> dict[str, Any]:
    """The question and the answer, as in ``summary.json``, with the costs of GPUs with a price.
    ``refine`` times, deployments halfway between the best and its neighbours are searched, too."""
    section, where = lab.section, draft.source.file
    found = answers(lab, options, where, bands)
    for _ in range(refine):
        if not (further := _halfway(lab, draft, found)):
            break
        found += answers(lab, further, where, bands)
        found = [found[place] for place in in_order([one.option.point for one in found])]
    lab.write_tables()
    deployments = [as_json(each, section.load) for each in found]
    for one, each in zip(deployments, found, strict=True):
        gpus = each.option.deployment.gpus
        if gpus.keys() <= prices.gpu_hour.keys():
            add_costs(one, sum(prices.gpu_hour[device] * count for device, count in gpus.items()))
    return {
        "format": CAPACITY_FORMAT,
        "name": draft.header.name,
        "description": draft.header.description,
        "slo": section.slo,
        "load": section.load,
        "tolerance": section.tolerance,
        "keep": section.replications.keep,
        "may_reject": section.rejected,
        "deployments": deployments,
        **said_of([one.option for one in found], section.load),
        "prices": prices.stated,
        "probes": len(lab.runs.keys() - lab.report.failures.keys()),
        "provenance": "predicted",
    }


def _halfway(lab: Laboratory, draft: Draft, found: Sequence[Answer]) -> list[Option]:
    loads, options = [one.load for one in found], list[Option]()
    if not any(loads):
        return []
    for point in between(loads.index(max(loads)), [one.option.point for one in found]):
        scenario = point.pop("scenario")
        try:
            options.append(option_at(draft, lab.section, scenario, point))
        except UserError as error:
            lab.say(f"not between: {str(error).splitlines()[0]}")
    if options:
        lab.say(f"refining: {'; '.join(one.name for one in options)}")
    return options


def result_files(
    draft: Draft, section: CapacitySection, content: Mapping[str, Any]
) -> dict[str, bytes]:
    """The files of the result beside its probes."""
    found = content["deployments"]
    return {
        SUMMARY: json_bytes(content),
        "capacity.csv": capacities(found).to_csv(index=False).encode(),
        "headroom.csv": headroom(found).to_csv(index=False).encode(),
        "config.yaml": question_yaml(draft, section),
    }


def question_yaml(draft: Draft, section: CapacitySection | None) -> bytes:
    """A configuration that asks the same again; without a ``section`` it has the file's own."""
    config = {**draft.header.model_dump(include={"name", "description"}), **draft.raw}
    if section is not None:
        config["capacity"] = section.model_dump(exclude_none=True)
    return dump_yaml({**config, "scenarios": draft.overrides}).encode()


def headroom(found: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row a probe of the headroom curves."""
    rows = []
    for one in found:
        for probe in one.get("curve", ()):
            flat = {key: value for key, value in probe.items() if key not in ("slo", "stress")}
            share = probe["load"] / one["offered"] if one["capacity"] else None
            rows.append(
                {"deployment": one["name"], "part_of_capacity": share, **flat, **probe["slo"]}
                | {f"{text}, part of the limit": part for text, part in probe["stress"].items()}
            )
    return pd.DataFrame(rows)


def capacities(found: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row a deployment."""
    rows = []
    first = ("policy", "capacity", "settled", "offered", "rejected_share", "saturation")
    for one in found:
        binds = one.get("binds") or {}
        row = {"name": one["name"], "device": one["device"], **layout(one)}
        row |= {key: one.get(key) for key in first}
        for key in ("interval", "band", "uncertainty"):
            row[f"{key}_low"], row[f"{key}_high"] = one.get(key) or (None, None)
        row |= {key: one.get(key) for key in ("per_hour", *COSTS)}
        rows.append(
            {
                **row,
                "limiting_metric": binds.get("slo"),
                "because": binds.get("because"),
            }
        )
    return with_counts(rows)


_COUNTS = ("tp", "pp", "dp", "drafts", "replicas", "gpus")


def layout(one: Mapping[str, Any]) -> dict[str, int | None]:
    """A deployment's degrees of parallelism, draft length, replicas and GPUs; of two pools each
    pool's, too, as ``prefill_tp`` (its replicas are the workers)."""
    found = {key: one[key] for key in _COUNTS if key in one}
    for pool, each in one.get("pools", {}).items():
        found |= {f"{pool}_{key}": each[key] for key in _COUNTS if key in each}
    return found


def with_counts(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A table whose counts (:func:`layout`) are whole numbers where some rows have none."""
    table = pd.DataFrame(rows)
    counts = [name for name in table if str(name).rpartition("_")[2] in _COUNTS]
    return table.astype(dict.fromkeys(counts, "Int64"))
