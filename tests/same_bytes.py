"""Does a change leave every result as it was, to the last byte?

    python -m tests.same_bytes BEFORE_REF

Simulates a frozen set of configurations twice, with the code of the commit BEFORE_REF and with
that of this checkout, each in processes of its own, and compares tables, ledgers, the numbers of
the summaries, a sweep's table, and what ``compare``, ``advise`` and ``reproduce`` print. Bands say
how sure a number is, and are left out: their rule may change. Exits with 1 if anything differs, and
names it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).resolve().parents[1]
TABLES = ("requests.parquet", "iterations.parquet", "ledger.csv")
PRINTED = {
    "advise": ["advise", "--model", "llama-13b", "--device", "a6000", "--workload", "1K@14"],
    "reproduce": ["reproduce"],
}

ORCA = [{"name": "orca", "case": case} for case in ("best", "worst", "unconstrained")]
SARATHI = [
    {"name": "sarathi", "chunk_size": chunk, "chunk_rule": rule}
    for chunk, rule in ((256, "fill"), (512, "reserve"), (128, "fixed"))
]
POLICIES = [*ORCA, *SARATHI, {"name": "request_level"}]


def _pipeline() -> dict[str, Any]:
    """GPT-3 on eight stages: every policy, and every switch of the simulated engine."""
    orca, sarathi = {"policy": ORCA[0]}, {"policy": SARATHI[0]}
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
        scenarios[f"{name}_orca"] = {**orca, **switch}
        scenarios[f"{name}_sarathi"] = {**sarathi, **switch}
    return {
        "name": "pipeline",
        "seed": 3,
        "model": "gpt3-175b",
        "device": "a100-80g-sxm",
        "workload": {
            "requests": 600,
            "lengths": {"kind": "zipf", "theta": 0.4, "min": 256, "max": 2048, "step": 1},
            "pd_ratio": 10,
        },
        "cluster": {"tp": 8, "pp": 8, "max_length": 2048},
        "scenarios": scenarios,
    }


def _single(trace: Path) -> dict[str, Any]:
    """Llama-13B on one A6000: every policy under Poisson, other arrivals and lengths, a trace."""
    scenarios: dict[str, dict[str, Any]] = {f"p{i}": {"policy": p} for i, p in enumerate(POLICIES)}
    bursts = {"arrivals": {"kind": "gamma", "rate": 1.5, "cv": 3}}
    rows = {
        "lengths": {"kind": "trace", "path": str(trace)},
        "arrivals": {"kind": "trace"},
        "pd_ratio": None,
    }
    for i, policy in enumerate((ORCA[0], SARATHI[0])):
        scenarios[f"bursts{i}"] = {"policy": policy, "workload": bursts}
        scenarios[f"trace{i}"] = {"policy": policy, "workload": rows}
        scenarios[f"two_stages{i}"] = {"policy": policy, "cluster": {"pp": 2}}
        scenarios[f"two_free{i}"] = {
            "policy": policy,
            "cluster": {"pp": 2},
            "batching": {"micro_batches": "free"},
        }
    return {
        "name": "single",
        "seed": 11,
        "model": "llama-13b",
        "device": "a6000",
        "workload": {
            "requests": 300,
            "lengths": {"kind": "uniform", "min": 64, "max": 1024},
            "pd_ratio": 4,
            "arrivals": {"kind": "poisson", "rate": 1.2},
            "too_long": "reject",
        },
        "cluster": {"max_length": 1024},
        "scenarios": scenarios,
    }


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

    def command(*arguments: str) -> str:
        whole = [sys.executable, "-m", "experiments", *arguments]
        done = subprocess.run(whole, cwd=code, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
        return done.stdout

    found: dict[str, bytes | str] = {}
    for name in ("pipeline", "single"):
        out = into / name
        command("run", str(work / f"{name}.yaml"), "--out", str(out))
        summary = json.loads((out / "summary.json").read_text())
        for scenario, numbers in summary["scenarios"].items():
            found[f"{name}/{scenario}/summary"] = json.dumps(numbers, sort_keys=True)
            for table in TABLES:
                found[f"{name}/{scenario}/{table}"] = (out / scenario / table).read_bytes()
        found[f"{name}/compare"] = command(
            "compare", "--json", str(out / "p0"), str(out / "p3")
        ).replace(str(into), "")
    command("sweep", str(work / "sweep.yaml"), "--out", str(into / "sweep"))
    table = pd.read_parquet(into / "sweep" / "results.parquet")
    # A run's key covers the code, so it differs between two versions of it.
    found["sweep"] = table.sort_index(axis=1).drop(columns="run").to_csv()
    for name, arguments in PRINTED.items():
        found[name] = command(*arguments)
    return found


def _same(before: bytes | str, after: bytes | str) -> bool:
    """Whether two are the same. Summaries may have gained keys, which is no difference."""
    if before == after:
        return True
    try:
        old, new = json.loads(before), json.loads(after)
    except ValueError:
        return False
    return _held(old, new)


def _held(old: Any, new: Any) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        kept = {key: value for key, value in old.items() if not key.endswith(("_band", "_bands"))}
        return all(key in new and _held(value, new[key]) for key, value in kept.items())
    return bool(old == new)


def main() -> int:
    """Compare, print what differs, and return the exit code."""
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
            for config in (_pipeline(), _single(work / "trace.csv"), _sweep()):
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
