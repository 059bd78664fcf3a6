"""What ``--workload`` names: a configuration's workload, a trace, or lengths as in 1024:256."""

from __future__ import annotations

import re
from typing import Any

from experiments.config.errors import ConfigError
from experiments.config.loading import read_draft
from profiler.storage.paths import user_path

_LENGTHS = re.compile(r"(\d+):(\d+)")
POISSON: dict[str, Any] = {"kind": "poisson", "rate": 1}


def parse_workload(text: str, max_length: int | None) -> tuple[dict[str, Any], int]:
    """The section ``workload``, and the longest sequence to be served. Raises ConfigError."""
    usual = {"requests": 10_000, "arrivals": POISSON, "declared": "exact", "too_long": "reject"}
    if match := _LENGTHS.fullmatch(text):
        prompt, decode = int(match[1]), int(match[2])
        lengths: dict[str, Any] = {"kind": "random", "prompt": prompt, "decode": decode}
        lengths["range_ratio"] = 0.5
        return {**usual, "lengths": lengths}, max_length or _rounded(prompt + decode)
    path = user_path(text)
    if path.suffix in (".csv", ".jsonl"):
        if max_length is None:
            raise ConfigError(f"--workload {text}: a trace needs --max-length, its longest request")
        del usual["requests"]
        return {**usual, "lengths": {"kind": "trace", "path": str(path)}}, max_length
    draft = read_draft(text)
    workload, cluster = draft.raw.get("workload"), draft.raw.get("cluster")
    if not isinstance(workload, dict):
        raise ConfigError(f"--workload {text}: this configuration has no section workload")
    given = cluster.get("max_length") if isinstance(cluster, dict) else None
    if max_length is None and not isinstance(given, int):
        raise ConfigError(f"--workload {text}: it states no cluster.max_length: give --max-length")
    kept = {key: value for key, value in workload.items() if key != "declared"}
    return {**kept, "declared": "exact"}, max_length or int(str(given))


def _rounded(tokens: int) -> int:
    return -(-tokens // 512) * 512
