"""Random questions from a fixed seed: command lines of ``recommend``, configurations of
``capacity``.

The limits of an SLO follow from the size of the model and of the GPU by simple arithmetic, so that
most questions have an answer. Nothing here comes from the search that is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

SEED = 20_261_123
"""The seed of the questions that are asked by default."""
RARE = ("tolerance", "max_length", "drafts")
"""Options of ``recommend`` that are given by ``--set``."""
SPECIAL = ("pools", "ranks", "drafts")
"""What every fourth question is about, in turn: prefill and decode workers, ranks with attention of
their own, speculation. Twelve numbers long by ``recommend``, then by ``capacity``."""
COMMAND_LINE, HARD, FULL_SPACE = 0.6, 0.3, 0.06
"""Shares of questions: asked on the command line; hard; with all budgets and sequence limits."""


@dataclass(frozen=True)
class ModelSize:
    """Parameters in billions, all and those that a token meets; bytes of the KV cache a token."""

    parameters: float
    active: float
    kv_bytes: float


@dataclass(frozen=True)
class GpuSize:
    """Memory in GB, memory bandwidth in TB/s, dense BF16 TFLOP/s, GPUs of a node, stacks."""

    memory: float
    bandwidth: float
    tflops: float
    node: int
    stacks: tuple[str, ...]


MODELS = {
    "llama-3.1-8b": ModelSize(8.0, 8.0, 131_072),
    "qwen3-8b": ModelSize(8.2, 8.2, 147_456),
    "mistral-7b": ModelSize(7.2, 7.2, 131_072),
    "qwen3-32b": ModelSize(32.8, 32.8, 262_144),
    "llama-3.3-70b": ModelSize(70.6, 70.6, 327_680),
    "qwen3-30b-a3b": ModelSize(30.5, 3.3, 98_304),
    "mixtral-8x7b": ModelSize(46.7, 12.9, 131_072),
    "deepseek-r1": ModelSize(335.5, 18.5, 70_272),  # fp8: half of its parameters
    "llama-13b": ModelSize(13.0, 13.0, 819_200),
}
ALL_STACKS = ("vllm", "sglang", "trtllm")
GPUS = {
    "h100-80g-sxm": GpuSize(80, 3.35, 989, 8, ALL_STACKS),
    "h200-sxm": GpuSize(141, 4.8, 989, 8, ALL_STACKS),
    "a100-80g-sxm": GpuSize(80, 2.0, 312, 8, ALL_STACKS),
    "b200-sxm": GpuSize(180, 8.0, 2250, 8, ALL_STACKS),
    "l40s": GpuSize(48, 0.864, 362, 8, ALL_STACKS),
    "a6000": GpuSize(48, 0.768, 155, 4, ()),
}
PAIRS = (
    *(("llama-3.1-8b", device) for device in ("h100-80g-sxm", "a100-80g-sxm", "l40s", "h200-sxm")),
    *(("qwen3-8b", device) for device in ("h100-80g-sxm", "b200-sxm", "l40s")),
    *(("mistral-7b", device) for device in ("a100-80g-sxm", "l40s")),
    *(("qwen3-32b", device) for device in ("h100-80g-sxm", "h200-sxm", "a100-80g-sxm")),
    *(("llama-3.3-70b", device) for device in ("h100-80g-sxm", "h200-sxm", "b200-sxm")),
    *(("qwen3-30b-a3b", device) for device in ("h100-80g-sxm", "h200-sxm")),
    ("mixtral-8x7b", "h100-80g-sxm"),
    *(("llama-13b", device) for device in ("a6000", "a6000", "a6000", "a100-80g-sxm")),
)
"""What is asked about; a pair that stands here twice is asked about twice as often."""
RANKED = (
    *(("qwen3-30b-a3b", device) for device in ("h100-80g-sxm", "h200-sxm")),
    *(("deepseek-r1", device) for device in ("h200-sxm", "b200-sxm")),
)
"""The mixtures whose ranks are asked about, on a node of eight GPUs."""


@dataclass(frozen=True)
class Trace:
    """A trace that a question needs: lognormal lengths (clipped), gaps of a gamma distribution.

    Its CSV has ``arrival_s``, ``prompt_tokens``, ``output_tokens``.
    """

    seed: int
    rows: int
    prompt: float
    output: float
    sigma: float
    longest: int
    cv: float

    def csv(self) -> str:
        """The file, at one request a second in the mean."""
        rng = np.random.default_rng(self.seed)
        gaps = rng.gamma(self.cv**-2, self.cv**2, self.rows)
        arrival = np.cumsum(gaps) - gaps[0]
        most_output = max(8, self.longest // 4)

        def lengths(mean: float, most: int) -> Any:
            drawn = rng.lognormal(np.log(mean) - self.sigma**2 / 2, self.sigma, self.rows)
            return np.clip(np.round(drawn), 2, most).astype(int)

        output = lengths(self.output, most_output)
        prompt = lengths(self.prompt, self.longest - most_output)
        lines = [
            f"{at:.6f},{tokens},{answer}"
            for at, tokens, answer in zip(arrival, prompt, output, strict=True)
        ]
        return "\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n"


@dataclass(frozen=True)
class Question:
    """A question: a command line of ``recommend``, or a configuration of ``capacity``.

    ``options`` are those of the command, by name. ``kind`` begins with what is special in it.
    A ``{trace}`` in an option or a value stands for the CSV's path.
    """

    number: int
    command: str
    slo: str
    tolerance: float
    hard: bool
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    trace: Trace | None = None

    @property
    def name(self) -> str:
        """Such as ``q007``."""
        return f"q{self.number:03d}"

    def arguments(self, folder: Path) -> list[str]:
        """The command's arguments, without ``--out``; writes the files that it needs."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.csv"
        if self.trace is not None:
            path.write_text(self.trace.csv())
        if self.command == "recommend":
            words = [self.command]
            for key, value in self.options.items():
                given = [] if value is True else [str(value)]
                words += ["--set", f"{key}={value}"] if key in RARE else [f"--{key}", *given]
            return [word.replace("{trace}", str(path)) for word in words]
        config = folder / f"{self.name}.yaml"
        text = yaml.safe_dump(dict(self.config), sort_keys=False)
        config.write_text(text.replace("{trace}", str(path)))
        return ["capacity", str(config), "--no-bands"]


@dataclass(frozen=True)
class Scale:
    """How long things take at least, roughly: weights read at 75 % of the bandwidth, FLOPs at half
    of the peak."""

    model: ModelSize
    gpu: GpuSize
    tp: int
    prompt: float
    output: float

    @property
    def decode_s(self) -> float:
        """An iteration of few decodes."""
        weights = 2e9 * self.model.parameters
        return weights / (0.75e12 * self.gpu.bandwidth * self.tp) + 0.003

    def prefill_s(self, tokens: float) -> float:
        """So many prompt tokens."""
        return 2e9 * self.model.active * tokens / (0.5e12 * self.gpu.tflops * self.tp) + 0.005

    def rate(self, sequences: int) -> float:
        """Requests a second of one replica, with batches of up to so many sequences."""
        room = 0.85e9 * self.gpu.memory * self.tp - 2e9 * self.model.parameters
        held = max(1.0, room / (self.model.kv_bytes * (self.prompt + self.output / 2)))
        batch = min(held, sequences, 96)
        return 1 / (self.prefill_s(self.prompt + self.output) + self.output * self.decode_s / batch)


def question(number: int, seed: int = SEED) -> Question:
    """A question of a seed; each has a random stream of its own."""
    draw = Draw(np.random.default_rng([seed, number]))
    on_line, hard, special = draw.chance(COMMAND_LINE), draw.chance(HARD), ""
    if number % 4 == 3:
        on_line, hard, special = number // 12 % 2 == 0, False, SPECIAL[number // 4 % 3]
    return (_recommend if on_line else _capacity)(number, draw, hard, special)


class Draw:
    """Random choices as plain Python values."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def chance(self, share: float) -> bool:
        """True with that probability."""
        return bool(self.rng.random() < share)

    def one(self, values: Any) -> Any:
        """One of them."""
        return values[int(self.rng.integers(len(values)))]

    def some(self, values: Any, least: int, most: int) -> list[Any]:
        """Several of them, in their order."""
        count = int(self.rng.integers(least, min(most, len(values)) + 1))
        chosen = sorted(self.rng.choice(len(values), count, replace=False))
        return [values[int(one)] for one in chosen]

    def between(self, low: float, high: float) -> float:
        """A number; its logarithm is evenly distributed."""
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def whole(self, low: int, high: int) -> int:
        """A whole number of both or between, evenly distributed."""
        return int(self.rng.integers(low, high + 1))


def _pair(draw: Draw, special: str) -> tuple[str, str, int]:
    """A model, a device, and the fewest GPUs of tensor parallelism that hold the weights."""
    known = [pair for pair in PAIRS if GPUS[pair[1]].stacks] if special else PAIRS
    model, device = draw.one(RANKED if special == "ranks" else known)
    gpu, tp = GPUS[device], 1
    while 2 * MODELS[model].parameters > 0.7 * gpu.memory * tp:
        tp *= 2
    return model, device, tp


def _lengths(draw: Draw, longest: int) -> tuple[int, int]:
    """Mean prompt and output tokens that fit twice into the longest sequence."""
    prompt = int(draw.between(100, min(3000, longest / 3)))
    output = int(draw.between(16, min(500, longest / 8)))
    return prompt, output


def _tolerance(draw: Draw, hard: bool) -> float:
    """At least the default of the commands, of long runs more."""
    low, high = (0.15, 0.5) if hard else (0.02, 0.5)
    return round(max(0.05, draw.between(low, high)), 3)


def _slo(draw: Draw, scale: Scale, budget: int, hard: bool, special: str) -> str:
    """One to three clauses, the limits from the scale."""

    def limit(seconds: float) -> str:
        return f"{float(f'{seconds:.3g}'):g}s" if seconds >= 1 else f"{1e3 * seconds:.3g}ms"

    statistic = ("mean", "p50", "p90", "p99")
    mixed_s = scale.decode_s + scale.prefill_s(min(budget, 2 * scale.prompt))
    ttft_s = scale.prefill_s(scale.prompt) * draw.between(1.5, 30) + scale.decode_s
    if hard:
        ttft_s = draw.between(4, 30)
    ttft_s = max(ttft_s, 2.5 * mixed_s) + 0.1 * (special == "pools")  # the KV cache is sent
    tpot_s = scale.decode_s * draw.between(1.3, 6)
    whole_s = ttft_s + scale.output * tpot_s
    if draw.chance(0.2):
        limits = [f"ttft {limit(1.5 * ttft_s)}"]
        if draw.chance(0.7):
            limits.append(f"tpot {limit(1.2 * tpot_s)}")
        elif draw.chance(0.5):
            limits.append(f"latency {limit(2 * whole_s)}")
        return f"attainment {draw.one((80, 90, 95, 99))}% {' '.join(limits)}"
    clauses = []
    if hard or draw.chance(0.75):
        clauses.append(f"{draw.one(statistic)} ttft {limit(ttft_s)}")
    kind = draw.one(("tpot", "tpot", "tbt", "itl", "tbt_max", "latency", "e2e", ""))
    if kind in ("latency", "e2e"):
        clauses.append(f"{draw.one(statistic)} {kind} {limit(1.5 * whole_s)}")
    elif kind == "tbt_max":
        clauses.append(f"{draw.one(statistic)} tbt_max {limit(mixed_s * draw.between(1.4, 5))}")
    elif kind in ("tbt", "itl"):
        which = draw.one(statistic)
        seconds = mixed_s * draw.between(1.3, 4) if which in ("p90", "p99") else tpot_s
        clauses.append(f"{which} {kind} {limit(seconds)}")
    elif kind == "tpot" or not clauses:
        clauses.append(f"{draw.one(statistic)} tpot {limit(tpot_s)}")
    return ", ".join(clauses)


def _trace(draw: Draw, prompt: int, output: int, longest: int) -> Trace:
    seed, rows = draw.whole(0, 10**9), draw.whole(2000, 10_000)
    sigma, cv = round(draw.between(0.3, 1.0), 2), round(draw.between(0.7, 3), 2)
    return Trace(seed, rows, prompt, output, sigma, longest, cv)


def _recommend(number: int, draw: Draw, hard: bool, special: str) -> Question:
    model, device, tp = _pair(draw, special)
    gpu = GPUS[device]
    options: dict[str, Any] = {"model": model, "device": device}
    prompt, output = _lengths(draw, 4096)
    scale = Scale(MODELS[model], gpu, tp, prompt, output)
    full = draw.chance(FULL_SPACE)
    budgets = draw.some((512, 1024, 2048, 4096, 8192), 1, 1 if special else 2)
    sequences = draw.some((16, 32, 64, 128, 256), 1, 1 if special else 2)
    slo = _slo(draw, scale, max(budgets), hard, special)
    tolerance = _tolerance(draw, hard or bool(special))
    trace, kind = None, "one device"
    options["slo"] = slo
    if draw.chance(0.35) and special != "ranks":
        replicas = draw.between(8, 24) if hard else draw.between(0.4, 2 if special else 6)
        most = 48 / tp
        rate = 0.6 * scale.rate(max(sequences)) * min(replicas, most)
        options["rate"], kind = float(f"{rate:.3g}"), "rate"
    else:
        gpus = draw.one((16, 24, 32, 48, 64)) if hard else tp * draw.one((1, 1, 2, 2, 4))
        options["gpus"] = {"pools": 2 * gpus, "ranks": 8}.get(special, gpus)
    if draw.chance(0.25):
        trace = _trace(draw, prompt, output, 4096)
        # One in six has a limit that some of its requests exceed.
        options["workload"] = "{trace}"
        options["max_length"] = 4096 if draw.chance(5 / 6) else 2 * prompt + output
        kind += ", trace"
    elif draw.chance(0.5):
        options["workload"] = f"{prompt}:{output}"
    else:
        options["workload"] = f"{prompt}:{output}~{draw.one((0.2, 0.5, 0.8))}"
        kind += ", spread"
    if gpu.stacks:
        stacks = draw.some(gpu.stacks, 2, 2) if draw.chance(0.1) else [draw.one(gpu.stacks)]
        options["stack"] = ",".join(stacks)
    if not full or special or "rate" in options:
        options["budget"] = ",".join(map(str, budgets))
        options["seqs"] = ",".join(map(str, sequences))
    options["tolerance"] = tolerance
    if special == "pools":
        options["pools"] = True
    elif special == "drafts":
        options |= {"speculation": ":".join(_drafter(draw, number)), "drafts": "0,2"}
    kind = ", ".join(filter(None, (special, kind)))
    return Question(number, "recommend", slo, tolerance, hard, kind, options, {}, trace)


def _drafter(draw: Draw, number: int) -> tuple[str, str]:
    """A method, in turn, and the probabilities that each of two drafts holds."""
    held = ",".join(f"{draw.rng.uniform(0.4, 0.9):.2f}" for _ in range(2))
    return ("mtp", "eagle3", "ngram")[number // 12 % 3], held


LIMITS = {
    "vllm": ("max_num_batched_tokens", "max_num_seqs"),
    "sglang": ("chunked_prefill_size", "max_running_requests"),
    "trtllm": ("max_num_tokens", "max_batch_size"),
    "sarathi_serve": ("chunk_size", "max_num_seqs"),
}
"""The keys of a paged policy for its token budget and for the sequences of a batch."""


def limited(name: str, budget: int, sequences: int) -> dict[str, Any]:
    """A paged policy with these limits."""
    policy = {"name": name, **dict(zip(LIMITS[name], (budget, sequences), strict=True))}
    return policy | ({"enable_chunked_prefill": True} if name == "trtllm" else {})


def _policy(draw: Draw, stack: str, budget: int, sequences: int) -> dict[str, Any]:
    """Sections of a configuration, ``policy`` and ``batching``."""
    reserved = {"max_batch": sequences, "kv_reservation": "declared"}
    choice = draw.one(("own", "own", "own", "vllm", "sarathi", "sarathi_serve", "orca"))
    if choice == "sarathi":
        return {"policy": {"name": "sarathi", "chunk_size": budget}, "batching": reserved}
    if choice == "orca":
        return {"policy": {"name": "orca", "case": "best"}, "batching": reserved}
    name = (stack or "vllm") if choice == "own" else choice
    return {"policy": limited(name, budget, sequences)}


def _capacity(number: int, draw: Draw, hard: bool, special: str) -> Question:
    model, device, tp = _pair(draw, special)
    gpu = GPUS[device]
    stack = draw.one(gpu.stacks) if gpu.stacks else ""
    longest = 4096
    prompt, output = _lengths(draw, longest)
    budget, sequences = draw.one((512, 1024, 2048, 4096)), draw.one((16, 32, 64, 128, 256))
    scale = Scale(MODELS[model], gpu, tp, prompt, output)
    policy = {"policy": limited(stack or "vllm", budget, sequences)}
    policy = policy if special else _policy(draw, stack, budget, sequences)
    named = policy["policy"]["name"]
    cluster: dict[str, Any] = {"tp": tp, "pp": 1, "max_length": longest}
    kind = draw.one(("bursty", "bursty", "clients", "prefixes", "sessions", "trace", "trace"))
    if special or (kind in ("prefixes", "sessions") and named not in ALL_STACKS):
        kind = draw.one(("bursty", "clients", "trace")) if special else "bursty"
    rate = float(f"{0.3 * scale.rate(sequences):.3g}")
    arrivals: dict[str, Any] = {"kind": "poisson", "rate": rate}
    workload: dict[str, Any] = {
        "requests": 2000,
        "lengths": _length_section(draw, prompt, output),
        "arrivals": arrivals,
        "declared": "exact",
    }
    if workload["lengths"]["kind"] == "uniform":
        workload["pd_ratio"] = round(prompt / output, 3)
    trace = None
    if kind == "bursty":
        arrivals |= {"kind": "gamma", "cv": round(draw.between(0.5, 3), 2)}
    elif kind == "clients":
        think_s = round(draw.between(0.1, 10), 2) if draw.chance(0.5) else 0.0
        workload["arrivals"] = {"kind": "closed_loop", "clients": 4, "think_s": think_s}
    elif kind == "prefixes":
        tokens = draw.whole(64, 800)
        share = round(float(draw.rng.uniform(0.3, 1)), 2)
        workload["system_prompts"] = {"common": {"share": share, "tokens": tokens}}
        if draw.chance(0.5):
            other = round(min(0.4, 1 - share), 2)
            workload["system_prompts"]["other"] = {"share": other, "tokens": draw.whole(64, 800)}
    elif kind == "sessions":
        turns = draw.whole(2, 6)
        workload["lengths"] = {"kind": "fixed", "prompt": max(16, prompt // turns)}
        workload["lengths"]["decode"] = max(8, output // 2)
        workload.pop("pd_ratio", None)
        think_s = round(draw.between(1, 20), 1)
        workload["sessions"] = {"min_turns": 1, "max_turns": turns, "think_s": think_s}
    else:
        trace = _trace(draw, prompt, output, longest)
        lengths = {"kind": "trace", "path": "{trace}"}
        workload = {"lengths": lengths, "arrivals": {"kind": "trace"}, "declared": "exact"}
    if hard and kind != "clients":
        cluster["replicas"] = draw.one((4, 8, 16)) if kind == "trace" else draw.one((8, 16, 32))
    elif draw.chance(0.2) and not special:
        cluster |= {"replicas": 2, "router": draw.one(("round_robin", "least_tokens"))}
    space = _space(draw, named, budget, sequences, tp)
    if special:
        space = {key: values for key, values in space.items() if key.startswith("policy")}
    slo = _slo(draw, scale, budget, hard, special)
    tolerance = _tolerance(draw, hard or bool(special))
    config: dict[str, Any] = {"name": f"q{number:03d}", "seed": draw.whole(0, 10**6)}
    config |= {"model": model, "device": device}
    if stack:
        config["stack"] = stack
    config |= {"workload": workload, "cluster": cluster, **policy}
    if named in LIMITS:
        config["kv_cache"] = {"prefix_caching": kind in ("prefixes", "sessions")}
    if special == "pools":
        config["disaggregation"] = {
            pool: {"cluster": {"replicas": draw.whole(1, 2)}} for pool in ("prefill", "decode")
        }
        space["disaggregation.decode.cluster.replicas"] = [1, 2]
    elif special == "ranks":
        cluster |= {"tp": 1, "dp": 8, "expert_parallel": True}
        space["cluster.rank_router"] = ["round_robin", draw.one(("least_requests", "random"))]
    elif special == "drafts":
        method, held = _drafter(draw, number)
        drafts = {"method": method, "acceptance": list(map(float, held.split(",")))}
        space["speculation"] = [None, {**drafts, "draft_length": 2}]
    load = "clients" if kind == "clients" else "rate"
    config["capacity"] = {"slo": slo, "load": load, "tolerance": tolerance}
    if space:
        config["capacity"]["space"] = {"grid": space}
    kind = ", ".join(filter(None, (special, kind)))
    return Question(number, "capacity", slo, tolerance, hard, kind, {}, config, trace)


def _length_section(draw: Draw, prompt: int, output: int) -> dict[str, Any]:
    """Lengths with about those means; none is more than twice as long."""
    kind = draw.one(("fixed", "uniform", "quantiles"))
    total = prompt + output
    if kind == "fixed":
        return {"kind": "fixed", "prompt": prompt, "decode": output}
    if kind == "uniform":
        return {"kind": "uniform", "min": max(2, total // 2), "max": 3 * total // 2}

    def spread(mean: int) -> dict[str, float]:
        low, high = max(1, mean // 4), 2 * mean
        return {"p0": low, "p50": max(low, 0.9 * mean), "p90": 1.6 * mean, "p100": high}

    return {"kind": "quantiles", "prompt": spread(prompt), "decode": spread(output)}


def _space(draw: Draw, policy: str, budget: int, sequences: int, tp: int) -> dict[str, list[Any]]:
    """A grid of one to six deployments."""
    space: dict[str, list[Any]] = {}
    tokens, most = LIMITS.get(policy, ("chunk_size", "max_batch"))
    if policy != "orca" and draw.chance(0.5):
        space[f"policy.{tokens}"] = draw.one(([budget, 2 * budget], [256, budget]))
    if draw.chance(0.3):
        section = "policy" if policy in LIMITS else "batching"
        space[f"{section}.{most}"] = [sequences // 2, sequences]
    if draw.chance(0.2) and tp < 4:
        space["cluster.tp"] = [tp, 2 * tp]
    elif draw.chance(0.15):
        space["cluster.pp"] = [1, 2]
    return space
