"""Sensible deployments of a model: enumerated, and those that cannot be dropped with the reason.

Tensor parallelism stays inside a node and pipeline stages go across; replicas fill what is left of
the GPUs. A mixture's experts are divided among the ranks, or whole on one each (EP). Each layout
comes with several token budgets and sequence limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from sarathi_sim.experiments.capacity.capacity_section import CapacitySection, parse_slo
from sarathi_sim.experiments.capacity.options import Option
from sarathi_sim.experiments.config.deployment import deploy
from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.key_paths import Source
from sarathi_sim.experiments.config.loading import check_scenario
from sarathi_sim.experiments.run.traffic import parse_workload
from sarathi_sim.experiments.sweeps.plan import SharedRequests
from sarathi_sim.experiments.sweeps.points import Point
from sarathi_sim.profiler.facts.device import DeviceSpec, load_device
from sarathi_sim.profiler.facts.formats import STACKS, WEIGHT_DTYPES
from sarathi_sim.profiler.facts.model import ModelSpec, load_model
from sarathi_sim.profiler.kernels.stack_file import stacks_on
from sarathi_sim.profiler.storage.strict import did_you_mean

BUDGETS = (512, 1024, 2048, 4096, 8192)
SEQUENCES = (64, 128, 256, 512)
MOST_STAGES = 8
TRAFFIC = "capacity_llama3_70b"
"""Whose lengths there are, unless said: those of Azure's conversations of 2023."""
MOST_GPUS = 64
"""For a rate, unless said."""


@dataclass(frozen=True)
class Wanted:
    """What is asked for: a model on ``gpus`` GPUs of one of the devices, or as many as ``rate``
    requests a second need (at most ``gpus``). ``stated`` is the text of ``--workload``, if any."""

    model: str
    devices: tuple[str, ...]
    gpus: int
    section: CapacitySection
    workload: dict[str, Any]
    max_length: int
    rate: float | None = None
    stacks: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bf16",)
    budgets: tuple[int, ...] = BUDGETS
    sequences: tuple[int, ...] = SEQUENCES
    stated: str | None = None

    @property
    def not_tried(self) -> str:
        """What may be better, and was not looked at, in words."""
        stacks = self.stacks or {s for name in self.devices for s in _stacks(load_device(name))}
        listed: dict[str, Iterable[object]] = {"token budgets": self.budgets}
        listed["sequence limits"] = self.sequences
        if any(stacks):
            listed |= {"formats": self.dtypes, "stacks": sorted(filter(None, stacks))}
        but = (f"{what} but {', '.join(map(str, some))}" for what, some in listed.items())
        return f"{'; '.join(but)}; any other setting of the engine"


def layouts(wanted: Wanted) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Every deployment: its layout and limit of sequences, and a scenario of one replica."""
    model = load_model(wanted.model)
    for name in wanted.devices:
        device = load_device(name)
        for stack in wanted.stacks or _stacks(device):
            for dtype in wanted.dtypes:
                shapes = _shapes(model, device, wanted.gpus, bool(stack))
                for shape, *sizes in product(shapes, wanted.budgets, wanted.sequences):
                    yield _layout(wanted, name, stack, dtype, shape, *sizes)


def _stacks(device: DeviceSpec) -> tuple[str, ...]:
    """vLLM where its kernels were fitted; without any stack the device's own profile."""
    there = stacks_on(device.name)
    return ("vllm",) if "vllm" in there else tuple(there[:1]) or ("",)


def _shapes(
    model: ModelSpec, device: DeviceSpec, gpus: int, stack: bool
) -> Iterator[dict[str, Any]]:
    """``tp``, ``pp`` and, of a mixture under a stack, ``expert_parallel``."""
    tp = 1
    while tp <= min(gpus, device.gpus_per_node):
        try:
            model.check_tp(tp)
        except ValueError:
            break
        pp = 1
        while tp * pp <= gpus and pp <= min(MOST_STAGES, model.num_layers):
            shape: dict[str, Any] = {"tp": tp, "pp": pp}
            if model.experts is None or not stack or tp == 1:
                yield shape
            else:
                yield from ({**shape, "expert_parallel": whole} for whole in (False, True))
            pp *= 2
        tp *= 2


def _layout(
    wanted: Wanted,
    device: str,
    stack: str,
    dtype: str,
    shape: dict[str, Any],
    budget: int,
    most: int,
) -> tuple[Point, dict[str, Any]]:
    policies = {
        "sglang": {"chunked_prefill_size": budget, "max_running_requests": most},
        "trtllm": {
            "max_num_tokens": budget,
            "max_batch_size": most,
            "enable_chunked_prefill": True,
        },
    }
    usual = {"max_num_batched_tokens": budget, "max_num_seqs": most}
    policy = {"name": stack or "vllm", **policies.get(stack, usual)}
    scenario: dict[str, Any] = {
        "model": wanted.model,
        "device": device,
        "workload": wanted.workload,
        "cluster": {**shape, "max_length": wanted.max_length},
        "policy": policy,
    }
    if stack:
        scenario |= {"stack": stack, "dtype": dtype}
    several = [device] if len(wanted.devices) > 1 else []
    several += [stack] if len(wanted.stacks) > 1 else []
    several += [dtype] if len(wanted.dtypes) > 1 else []
    called = f"TP {shape['tp']}" + (" EP" if shape.get("expert_parallel") else "")
    called += f" PP {shape['pp']}" if shape["pp"] > 1 else ""
    layout = " ".join([*several, called, f"budget {budget}"])
    return {"layout": layout, "budget": budget, "seqs": most}, scenario


def deployable(wanted: Wanted) -> tuple[list[Option], dict[str, str]]:
    """The layouts that can be deployed, one replica each, and why others cannot, by name."""
    options, dropped, requests_of = [], {}, SharedRequests()
    for point, tree in layouts(wanted):
        name = f"{point['layout']} seqs {point['seqs']}"
        source = Source("recommend", name, {}, ())
        try:
            scenario = check_scenario(tree, source)
            deployment = deploy(scenario, source, requests_of)
        except ConfigError as error:
            dropped[name] = str(error).removeprefix("recommend: ").splitlines()[0]
            continue
        if deployment.rejected > wanted.section.rejected:
            dropped[name] = f"{deployment.rejections}; raise --max-length, or --rejected"
            continue
        options.append(Option(name, point, deployment))
    return options, dropped


def wanted_of(
    model: str,
    device: str,
    slo: str,
    gpus: int | None,
    rate: float | None,
    workload: str | None,
    max_length: int | None,
    stack: str | None,
    dtype: str | None,
    budget: str | None,
    seqs: str | None,
    tolerance: float,
    rejected: float = 0.0,
) -> Wanted:
    """What the command's options ask for, checked; without ``dtype`` the checkpoint's number
    format. Raises ConfigError."""
    if (gpus is None) == (rate is None):
        raise ConfigError("--gpus and --rate: give one of them")
    try:
        parse_slo(slo)
    except ValueError as error:
        raise ConfigError(f"--slo: {error}") from None
    section = CapacitySection(slo=slo, tolerance=tolerance, rejected=rejected)
    own, devices = load_model(model).dtype, _words("--device", device)
    for name in devices:
        load_device(name)
    traffic, longest = parse_workload(workload or TRAFFIC, max_length)
    return Wanted(
        model,
        devices,
        gpus or MOST_GPUS,
        section,
        traffic,
        longest,
        rate,
        _words("--stack", stack, STACKS) if stack else (),
        _words("--dtype", dtype or own, WEIGHT_DTYPES),
        _counts("--budget", budget) or BUDGETS,
        _counts("--seqs", seqs) or SEQUENCES,
        workload,
    )


def _words(option: str, text: str, allowed: Iterable[str] = ()) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    wrong = [word for word in found if not word or (allowed and word not in allowed)]
    if wrong:
        hint = ": expected names with commas"
        if allowed:
            hint = f": one of {', '.join(allowed)}{did_you_mean(wrong[0], allowed)}"
        raise ConfigError(f"{option} {text}: {wrong[0]!r}{hint}")
    return found


def _counts(option: str, text: str | None) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(",")) if text else ()
    except ValueError:
        found = (0,)
    if any(not 1 <= count <= 1_000_000 for count in found):
        raise ConfigError(f"{option} {text}: expected counts from 1 on, with commas")
    return found
