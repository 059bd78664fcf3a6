"""Records what an engine's scheduler decides, as ``sarathi-sim lab lockstep`` reads it
(docs/lab/lockstep.md).

    python -m tests.recorder vllm --out tests/data/vllm        the logs that the tests use
    python -m tests.recorder vllm --random 50 --out FOLDER     random settings and workloads

It needs the engine (``vllm`` or ``sglang``) and none of this project. Only the scheduler itself
runs: its batches take made-up times on a virtual clock, its tokens are made up, so a log is the
same on every machine.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import multiprocessing
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

ENGINES = ("vllm", "sglang")
EOS = 2
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 32000, "max_position_embeddings": 8192,
}  # fmt: skip


def write(folder: Path, header: dict[str, Any], settings: Any, engine: Any) -> None:
    """Record what the scheduler decides: ``folder/name.jsonl.gz``, with ``header``."""
    rows = engine.workload(settings, header["seed"])
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(TINY_MODEL))
        made = engine.Recording(settings, rows, Path(model))
        made.run()
    depth = {"depth": made.depth} if hasattr(made, "depth") else {}
    config = asdict(settings)
    config.pop("mode", None)
    if mode := getattr(settings, "log_mode", None):
        header["mode"] = mode
    header = {"format": 1, **header, **depth, "config": config, "requests": rows}
    lines = [json.dumps(line, separators=(",", ":")) for line in (header, *made.events)]
    content = gzip.compress("".join(f"{line}\n" for line in lines).encode(), 9, mtime=0)
    (folder / f"{header['name']}.jsonl.gz").write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.recorder", description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--random", type=int, default=0, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    engine: Any = importlib.import_module(f"tests.{options.engine}_recorder")
    logs = {name: (each, options.seed + i) for i, (name, each) in enumerate(engine.SHIPPED.items())}
    if options.random:
        draws = [random.Random(f"{options.seed} {i}") for i in range(options.random)]
        logs = {
            f"random{i:03d}": (engine.random_settings(draw), draw.randrange(10**6))
            for i, draw in enumerate(draws)
        }
    about = {"engine": options.engine, "version": engine.load()}
    for name, (settings, seed) in logs.items():
        arguments = (options.out, {**about, "name": name, "seed": seed}, settings, engine)
        if not engine.FORKED:
            write(*arguments)
            continue
        work = multiprocessing.get_context("fork").Process(target=write, args=arguments)
        work.start()
        work.join()
        if work.exitcode:
            sys.exit(f"{name}: not recorded")


if __name__ == "__main__":
    main()
