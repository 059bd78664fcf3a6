"""Does a change leave every result as it was, to the last byte?

    python -m tests.same_bytes BEFORE_REF

Simulates a frozen set of configurations twice, with the code of the commit BEFORE_REF and with
that of this checkout, each in processes of its own. Compares tables, ledgers and the numbers of the
summaries of every policy, with reserved and with paged memory; a sweep's table; what ``compare``,
``recommend --policy``, ``reproduce``, ``score``, ``lockstep`` print; the answers of ``capacity``,
``recommend`` and ``sensitivity``; and the numbers of a report. Bands say how sure a number is, and
are left out: their rule may change. A page and a table may show more than before, and no number
less. Exits with 1 if anything differs, and names it.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).resolve().parents[1]
TABLES = ("requests.parquet", "iterations.parquet", "ledger.csv")
PRINTED = {
    "chunks": [
        *("recommend", "--policy", "sarathi", "--gpus", "1"),
        *("--model", "llama-13b", "--device", "a6000", "--workload", "1K@14"),
    ],
    "reproduce": ["lab", "reproduce"],
}

ORCA = [{"name": "orca", "case": case} for case in ("best", "worst", "unconstrained")]
SARATHI = [
    {"name": "sarathi", "chunk_size": chunk, "chunk_rule": rule}
    for chunk, rule in ((256, "fill"), (512, "reserve"), (128, "fixed"))
]
POLICIES = [*ORCA, *SARATHI, {"name": "request_level"}]
CHUNKED = {"enable_chunked_prefill": True, "max_num_tokens": 1024}
PAGED: list[dict[str, Any]] = [
    {"name": "vllm", "max_num_batched_tokens": 512, "max_num_seqs": 64},
    {"name": "vllm", "async_scheduling": True, "watermark": 0.01, "max_num_batched_tokens": 1024},
    {"name": "vllm", "long_prefill_token_threshold": 256, "scheduler_reserve_full_isl": False},
    {"name": "sarathi_serve", "chunk_size": 256},
    {"name": "sarathi_serve", "enable_dynamic_chunking_schedule": True, "high_chunk_size": 1024},
    {"name": "sglang", "chunked_prefill_size": 1024, "max_running_requests": 64},
    {"name": "sglang", "schedule_policy": "lpm", "enable_mixed_chunk": True},
    {"name": "trtllm", "max_batch_size": 64},
    {"name": "trtllm", "capacity_scheduler_policy": "max_utilization", **CHUNKED},
    {"name": "fair", "max_num_batched_tokens": 512},
]
SLO = "p90 ttft 2s, p90 tpot 60ms"
SMALL = ["--workload", "600:60~0.5", "--slo", SLO, "--set", "tolerance=0.3"]
RECOMMEND = ["recommend", "--model", "llama-3-8b", "--device", "a100-80g-sxm", *SMALL]
# Commands that answer, with --json; CONFIG is the configuration of `_capacity`.
ANSWERED = {
    "capacity": ["capacity", "CONFIG", "--no-bands"],
    "recommend": [*RECOMMEND, "--gpus", "2", "--budget", "512", "--seqs", "64"],
    "rate": [*RECOMMEND, "--rate", "9", "--budget", "512", "--seqs", "64"],
    "sensitivity": ["capacity", "CONFIG", "--sensitivity", "--only", "attn_decode,burstiness"],
    "moved": [
        *("capacity", "bench_paged", "--sensitivity", "--metric", "makespan_s"),
        *("--only", "attn_decode", "--set", "workload.requests=100"),
    ],
}
RUNS = ("pipeline", "single", "paged", "stacks")
# What `compare` explains, and what a report shows.
COMPARED = {"pipeline": ("p0", "p3"), "single": ("p0", "p3"), "paged": ("p0", "p6")}
REPORTED = ("single", "paged", "sweep", "capacity", "recommend", "sensitivity")
# Servers to be predicted; what was measured on them is made up.
SERVERS = """id,backend,model,system,precision,dense,isl,osl,length_range_ratio,concurrency,tp,\
ttft_ms,tpot_ms
a,vllm,meta-llama/Llama-3.1-70B,h100_sxm,fp8,True,1024,1024,0.8,16,4,100,20
b,sglang,Qwen/Qwen3-32B,h200_sxm,bf16,True,1024,256,1,8,2,100,20
c,trtllm,openai/gpt-oss-120b,b200_sxm,fp4,False,512,128,1,32,2,100,20
"""


def _experiment(
    name: str,
    seed: int,
    on: tuple[str, str],
    requests: int,
    lengths: Any,
    ratio: int,
    **sections: Any,
) -> dict[str, Any]:
    """A configuration; its ``workload`` and ``cluster`` may say more."""
    about = {"name": name, "seed": seed, "model": on[0], "device": on[1]}
    kinds = {"zipf": ("theta", "min", "max", "step"), "uniform": ("min", "max")}
    drawn = {"kind": lengths[0], **dict(zip(kinds[lengths[0]], lengths[1:], strict=False))}
    workload = {"requests": requests, "lengths": drawn, "pd_ratio": ratio}
    return {**about, **sections, "workload": workload | sections.get("workload", {})}


def _poisson(rate: float) -> dict[str, Any]:
    return {"arrivals": {"kind": "poisson", "rate": rate}}


def _pipeline() -> dict[str, Any]:
    """GPT-3 on eight stages: every policy, and every switch of the simulated engine."""
    switches: dict[str, dict[str, Any]] = {
        "lazy": {"batching": {"formation": "lazy"}},
        "free": {"batching": {"micro_batches": "free"}},
        "free_lazy": {"batching": {"micro_batches": "free", "formation": "lazy"}},
        "shallow": {"batching": {"max_in_flight": 4}},
        "deep": {"batching": {"max_in_flight": 12, "max_batch": 12}},
        "free_deep": {"batching": {"micro_batches": "free", "max_in_flight": 12, "max_batch": 9}},
        "blocking": {"engine": {"send": "blocking"}},
        "slow_turn": {"engine": {"turnaround_s": 0.004}},
        "jitter": {"engine": {"jitter": 0.2}},
        "no_head": {"engine": {"lm_head": False}},
        "uneven": {"cluster": {"layers_per_stage": [10, 13, 12, 12, 12, 12, 13, 12]}},
        "declared": {"batching": {"kv_reservation": "declared"}, "workload": {"declared": "exact"}},
        "least": {"cluster": {"pp": 2, "replicas": 3, "router": "least_tokens"}},
    }
    scenarios = {f"p{i}": {"policy": policy} for i, policy in enumerate(POLICIES)}
    for name, switch in switches.items():
        scenarios[f"{name}_orca"] = {"policy": ORCA[0], **switch}
        scenarios[f"{name}_sarathi"] = {"policy": SARATHI[0], **switch}
    return _experiment(
        *("pipeline", 3, ("gpt3-175b", "a100-80g-sxm"), 600, ("zipf", 0.4, 256, 2048, 1), 10),
        cluster={"tp": 8, "pp": 8, "max_length": 2048},
        scenarios=scenarios,
    )


def _single(trace: Path) -> dict[str, Any]:
    """Llama-13B on one A6000: every policy under Poisson, other arrivals and lengths, a trace."""
    scenarios: dict[str, dict[str, Any]] = {f"p{i}": {"policy": p} for i, p in enumerate(POLICIES)}
    rows = {"lengths": {"kind": "trace", "path": str(trace)}, "arrivals": {"kind": "trace"}}
    others: dict[str, dict[str, Any]] = {
        "bursts": {"workload": {"arrivals": {"kind": "gamma", "rate": 1.5, "cv": 3}}},
        "trace": {"workload": {**rows, "pd_ratio": None}},
        "two_stages": {"cluster": {"pp": 2}},
        "two_free": {"cluster": {"pp": 2}, "batching": {"micro_batches": "free"}},
    }
    for i, policy in enumerate((ORCA[0], SARATHI[0])):
        scenarios |= {f"{name}{i}": {"policy": policy, **other} for name, other in others.items()}
    return _experiment(
        *("single", 11, ("llama-13b", "a6000"), 300, ("uniform", 64, 1024), 4),
        workload={**_poisson(1.2), "too_long": "reject"},
        cluster={"max_length": 1024},
        scenarios=scenarios,
    )


def _paged() -> dict[str, Any]:
    """Llama-3-8B with paged memory: every policy with room, with few blocks, and two stages."""
    changes: dict[str, dict[str, Any]] = {
        "": {},
        "_few": {"kv_cache": {"num_blocks": 700}},
        "_stages": {"cluster": {"pp": 2}},
        "_uncached": {"kv_cache": {"num_blocks": 900, "prefix_caching": False}},
    }
    prompts = {"a": {"share": 0.4, "tokens": 512}, "b": {"share": 0.2, "tokens": 96}}
    sessions = {"min_turns": 1, "max_turns": 4, "think_s": 3}
    return _experiment(
        *("paged", 5, ("llama-3-8b", "a100-80g-sxm"), 150, ("zipf", 0.6, 64, 1024), 3),
        workload={**_poisson(4), "system_prompts": prompts, "sessions": sessions},
        cluster={"max_length": 8192},
        scenarios={
            f"p{i}{name}": {"policy": policy, **change}
            for i, policy in enumerate(PAGED)
            for name, change in changes.items()
        },
    )


def _stacks() -> dict[str, Any]:
    """Serving stacks' kernels and host times: a dense model and a mixture, replicas, clients."""
    mixture = {"model": "qwen3-30b-a3b", "device": "h100-80g-sxm"}
    vllm: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm_fp8": {"dtype": "fp8"},
        "vllm_replicas": {"cluster": {"replicas": 3, "router": "least_tokens"}},
        "vllm_tp2_pp2": {"cluster": {"tp": 2, "pp": 2}},
        "mixture": {**mixture, "cluster": {"tp": 2}},
        "clients": {"workload": {"arrivals": {"kind": "closed_loop", "clients": 16}}},
        "reserved": {"policy": SARATHI[1], "batching": {"max_batch": 64}},
    }
    return _experiment(
        *("stacks", 7, ("llama-3.1-8b", "h100-80g-sxm"), 120, ("uniform", 100, 2000), 6),
        workload=_poisson(6),
        cluster={"max_length": 4096},
        policy=PAGED[0],
        scenarios={
            **{name: {"stack": "vllm", **change} for name, change in vllm.items()},
            "sglang": {"stack": "sglang", "policy": PAGED[5]},
            "sglang_mixture": {"stack": "sglang", "policy": PAGED[5], **mixture},
            "trtllm": {"stack": "trtllm", "policy": PAGED[7]},
        },
    )


def _capacity() -> dict[str, Any]:
    return _experiment(
        *("capacity", 0, ("llama-3-8b", "a100-80g-sxm"), 300, ("zipf", 0.6, 128, 1024), 5),
        workload=_poisson(2),
        cluster={"max_length": 2048},
        capacity={"slo": SLO, "tolerance": 0.2, "requests": 150, "most_requests": 2000},
        scenarios={
            "paged": {"policy": PAGED[0]},
            "reserved": {"policy": SARATHI[1], "batching": {"max_batch": 32}},
            "replicas": {"policy": PAGED[0], "cluster": {"replicas": 2}},
        },
    )


def _sweep() -> dict[str, Any]:
    config = _single(Path("unused"))
    del config["scenarios"]
    grid = {"policy": [ORCA[0], *SARATHI[:2]], "workload.arrivals.rate": [0.6, 1.2], "seed": [1, 2]}
    config["workload"]["requests"] = 60
    return {**config, "name": "sweep", "policy": ORCA[0], "sweep": {"grid": grid}}


def _trace(file: Path) -> None:
    lines = ["arrival_s,prompt_tokens,output_tokens"]
    lines += [f"{i * 0.37:.3f},{50 + 37 * i % 700},{3 + 13 * i % 90}" for i in range(320)]
    file.write_text("\n".join(lines) + "\n")


def _results(code: Path, work: Path, into: Path) -> dict[str, bytes | str]:
    """Everything that is compared, by name, as the code in ``code`` makes it."""
    environment = {**os.environ, "PYTHONPATH": str(code), "SARATHI_SIM_CACHE": str(into / "cache")}
    package = next(p for p in ("sarathi_sim", "experiments") if (code / p / "__main__.py").exists())

    library = code / "experiments" / "library.py"
    apart = not library.exists() or "def sensitivity(" in library.read_text()  # its own command

    def command(*arguments: str, expected: int = 0) -> str:
        words = list(arguments)
        if apart and "--policy" in words:
            words = ["advise", *words[5:]]
        if apart and "--sensitivity" in words:
            words = ["sensitivity", *(w for w in words[1:] if w != "--sensitivity")]
        if (code / "experiments" / "api.py").exists():  # the names before `lab` and `list`
            old = {"tolerance=0.3": ["--tolerance", "0.3"], "lab": []}
            words = [*chain.from_iterable(old.get(w, [w]) for w in words)]
            words = [
                w for w, then in pairwise([*words, ""]) if (w, then) != ("--set", "--tolerance")
            ]
        whole = [sys.executable, "-m", package, *words]
        done = subprocess.run(whole, cwd=code, env=environment, capture_output=True, text=True)
        if done.returncode != expected:
            raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout.replace(str(into), "").replace(str(code), "")

    found: dict[str, bytes | str] = {}
    for name in RUNS:
        out = into / name
        command("run", str(work / f"{name}.yaml"), "--out", str(out), "--no-figures")
        summary = json.loads((out / "summary.json").read_text())
        for scenario, numbers in summary["scenarios"].items():
            found[f"{name}/{scenario}/summary"] = json.dumps(numbers, sort_keys=True)
            for table in TABLES:
                found[f"{name}/{scenario}/{table}"] = (out / scenario / table).read_bytes()
    for name, (a, b) in COMPARED.items():
        both = [str(into / name / a), str(into / name / b)]
        found[f"{name}/compare"] = command("compare", "--json", *both)
    command("sweep", str(work / "sweep.yaml"), "--out", str(into / "sweep"))
    table = pd.read_parquet(into / "sweep" / "results.parquet")
    found["sweep"] = table.sort_index(axis=1).drop(columns="run").to_csv()
    for name, arguments in PRINTED.items():
        found[name] = command(*arguments)
    config = str(work / "capacity.yaml")
    for name, arguments in ANSWERED.items():
        whole = [config if argument == "CONFIG" else argument for argument in arguments]
        found[name] = command(*whole, "--out", str(into / name), "--json")
    found["score"] = command("lab", "score", str(work / "servers.csv"), "--json")
    logs = sorted((HERE / "tests" / "data" / "vllm").glob("*.jsonl.gz"))
    found["lockstep"] = command("lab", "lockstep", *map(str, logs), "--json").replace(str(HERE), "")
    for name in REPORTED:
        page = into / f"{name}.html"
        command("report", str(into / name), "--out", str(page), "--quiet")
        found[f"report/{name}"] = json.dumps(_shown(page.read_text()))
    return found


def _shown(page: str) -> dict[str, int]:
    """How often each number stands in the tables of an HTML page."""
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page, flags=re.DOTALL)
    text = re.sub(RUN_KEY, "", html.unescape(re.sub(r"<[^>]*>", " ", " ".join(cells))))
    return dict(sorted(Counter(re.findall(r"-?\d[\d,]*\.?\d*(?:e-?\d+)?", text)).items()))


def _same(before: bytes | str, after: bytes | str) -> bool:
    """Whether two are the same. Summaries may have gained keys, which is no difference."""
    if before == after:
        return True
    try:
        old, new = json.loads(before), json.loads(after)
    except ValueError:
        return False
    return _held(old, new)


# A run's key covers the code, so it differs between two versions of it.
RUN_KEY = r"\b[0-9a-f]{16}\b"
LEFT_OUT = (
    *("_band", "_bands", "_s_wall", "elapsed_s", "code", "question", "answer", "assumptions"),
    *("warnings", "notes", "run", "runs"),
)


def _held(old: Any, new: Any) -> bool:
    """Whether every number of ``old`` stands in ``new``; words that say it may be others."""
    if isinstance(old, dict) and isinstance(new, dict):
        kept = {key: value for key, value in old.items() if not key.endswith(LEFT_OUT)}
        return all(key in new and _held(value, new[key]) for key, value in kept.items())
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(map(_held, old, new))
    return bool(old == new)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)  # noqa: T201
        return 2
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        before = work / "before"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--quiet", str(before), sys.argv[1]],
            cwd=HERE, check=True,
        )  # fmt: skip
        try:
            _trace(work / "trace.csv")
            (work / "servers.csv").write_text(SERVERS)
            single = _single(work / "trace.csv")
            for config in (_pipeline(), single, _paged(), _stacks(), _capacity(), _sweep()):
                (work / f"{config['name']}.yaml").write_text(json.dumps(config))
            old = _results(before, work, work / "old")
            new = _results(HERE, work, work / "new")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=HERE)
    differ = [name for name in old if name not in new or not _same(old[name], new[name])]
    configurations = {name.rpartition("/")[0] for name in old}
    print(f"{len(configurations)} configurations, {len(old)} results, {len(differ)} differ")  # noqa: T201
    for name in differ:
        print(f"  differs: {name}")  # noqa: T201
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
