"""Runs real vLLM on the CPU, in a Python of its own, interleaved with grids and calibration.

A repeat is, as for our engine (:mod:`sarathi_sim.experiments.validate.session`): grid; for each
cell calibration, the workload, calibration; grid.
:mod:`sarathi_sim.experiments.validate.vllm_server` is the program that serves; it is started once,
and never imported here with vLLM in it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryFile
from typing import Any

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.experiments.config.scenario import Validation
from sarathi_sim.experiments.validate.session import Cell
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.storage.child import Progress

VARIABLE = "SARATHI_SIM_VLLM_PYTHON"
"""Names the Python that has vLLM, if this one has not."""
TIMES = 5
"""How often the grid times each of its cells."""
SHORT = 16
"""Tokens of the grid's shorter contexts."""


@dataclass(frozen=True)
class VllmRun:
    """A workload and what vLLM made of it: ``run`` is the program's answer."""

    requests: list[Request]
    run: dict[str, Any]

    @property
    def wall_over_cpu(self) -> float:
        """How much longer it took than its own CPU time: what other programs took."""
        return float(self.run["wall_s"] / self.run["cpu_s"])


@dataclass(frozen=True)
class VllmCell:
    """A cell's run, and the two calibration runs around it."""

    run: VllmRun
    calibration: list[VllmRun]


@dataclass(frozen=True)
class VllmRepeat:
    """The rows of the grids before and after, what was served for each cell, the load average."""

    grids: tuple[list[list[float]], list[list[float]]]
    served: dict[str, VllmCell]
    load: float


@dataclass(frozen=True)
class VllmSession:
    """All that vLLM did."""

    cells: list[Cell]
    repeats: list[VllmRepeat]
    about: dict[str, Any]
    seconds: float


def find_python() -> str:
    """The Python with vLLM. Raises ConfigError where there is none."""
    found = os.environ.get(VARIABLE) or (sys.executable if importlib.util.find_spec("vllm") else "")
    if not found:
        raise ConfigError(
            f"no vLLM: install the extra (pip install 'sarathi-sim[vllm]'), or name in {VARIABLE} "
            "a Python with it (docs/lockstep.md)"
        )
    return found


def check_cells(cells: Sequence[Cell]) -> None:
    """Raises ConfigError for what this engine does not run, or not in one process."""
    for cell in cells:
        policy, cluster = cell.scenario.policy.build(), cell.scenario.cluster
        plain = type(policy) is Vllm and not policy.ahead
        for key, value, good, problem in (
            ("policy.name", cell.scenario.policy.name, plain, "must be vllm, not asynchronous"),
            ("device", cell.device, cell.device == "cpu", "must be cpu"),
            ("cluster.pp", cluster.pp, cluster.pp * cluster.tp == 1, "one process is run"),
        ):
            if not good:
                raise cell.source.error(key, value, problem)
        if engine_arguments(cell) != engine_arguments(cells[0]):
            problem = f"must be as in {cells[0].name}, whose engine it shares"
            raise cell.source.error("policy", cell.scenario.policy.name, problem)


def engine_arguments(cell: Cell) -> dict[str, Any]:
    """The cell's settings as vLLM's ``EngineArgs`` name them."""
    policy, cache = cell.scenario.policy.build(), cell.kv_cache
    assert isinstance(policy, Vllm) and cache is not None
    return {
        "max_model_len": cell.max_length,
        "max_num_seqs": policy.max_num_seqs,
        "max_num_batched_tokens": policy.max_num_batched_tokens,
        "enable_chunked_prefill": policy.enable_chunked_prefill,
        "long_prefill_token_threshold": policy.long_prefill_token_threshold,
        "scheduling_policy": policy.scheduling_policy,
        "watermark": policy.watermark,
        "scheduler_reserve_full_isl": policy.scheduler_reserve_full_isl,
        "block_size": cache.block_size,
        "num_gpu_blocks_override": cache.num_blocks,
        "enable_prefix_caching": cache.prefix_caching,
    }


def llama_config(model: ModelSpec) -> dict[str, Any]:
    """The model as a Hugging Face configuration of type ``llama``, with float32 weights."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    }


def grid_work(cells: Sequence[Cell]) -> dict[str, Any]:
    """The grid: decodes, their contexts, and tokens of a prompt beside them, up to the budget."""
    arguments = engine_arguments(cells[0])
    most, budget = arguments["max_num_seqs"] - 1, arguments["max_num_batched_tokens"]
    longest = max(r.prompt_tokens + r.output_tokens for cell in cells for r in cell.requests())
    room = max(1, budget - most)
    decodes = sorted({0, 1, 2, 4, most // 2, most} - {n for n in (1, 2, 4) if n > most})
    prompts = sorted({0, *(max(1, room * part // 8) for part in (1, 2, 4, 6, 8))})
    # All of them must fit into the blocks, with what they generate and a prompt beside them.
    size = arguments["block_size"]
    fitting = (arguments["num_gpu_blocks_override"] - 1) * size - room
    context = min(longest, fitting // max(most, 1) - TIMES * len(prompts) - size)
    if context <= SHORT:
        problem = f"too few: the grid holds {most} sequences at a time"
        raise cells[0].source.error(
            "kv_cache.num_blocks", arguments["num_gpu_blocks_override"], problem
        )
    return {"decodes": decodes, "contexts": [SHORT, context], "prompts": prompts, "times": TIMES}


Plan = list[tuple[str, list[Request] | None]]
"""What is done in turn: the name of a cell and its requests, or ``grid``."""


def plan_of(cells: Sequence[Cell], settings: Validation) -> Plan:
    """All work of a session, the warm-up first. Calibration has other seeds than the workloads."""
    few = settings.calibration_requests
    plan: Plan = [("grid", None), ("warm-up", cells[0].requests(seed=1, count=few))]
    for number in range(settings.repeats):
        plan.append(("grid", None))
        for cell in cells:
            seeds = (2_000_000 + 2 * number, 2_000_001 + 2 * number)
            first, last = (cell.requests(seed, few) for seed in seeds)
            plan += [(cell.name, first), (cell.name, cell.requests()), (cell.name, last)]
        plan.append(("grid", None))
    return plan


def job_of(cells: Sequence[Cell], plan: Plan) -> dict[str, Any]:
    """What the program gets."""
    grid = grid_work(cells)
    work: list[dict[str, Any]] = [
        {"grid": grid}
        if requests is None
        else {"serve": [[r.arrival_s, r.prompt_tokens, r.output_tokens] for r in requests]}
        for _, requests in plan
    ]
    model = llama_config(cells[0].model)
    return {"model": model, "engine": engine_arguments(cells[0]), "work": work}


def run_session(
    cells: list[Cell], settings: Validation, timeout_s: float, progress: Progress
) -> VllmSession:
    """Do everything. Raises ConfigError where vLLM is missing, fails, or is silent for too long."""
    python, plan, began = find_python(), plan_of(cells, settings), time.perf_counter()
    answers: list[dict[str, Any]] = []
    loads = []
    for answer in _answers(python, job_of(cells, plan), timeout_s):
        progress("runs of the engine", len(answers), len(plan))
        answers.append(answer)
        loads.append(os.getloadavg()[0])
    return session_of(cells, plan, answers, loads, time.perf_counter() - began)


def session_of(
    cells: list[Cell],
    plan: Plan,
    answers: Sequence[dict[str, Any]],
    loads: Sequence[float],
    seconds: float,
) -> VllmSession:
    """The program's answers (the first one is about itself) in the order of the plan."""
    about, *done = answers
    rest = iter(list(zip(plan, done, loads[1:], strict=True))[2:])
    repeats = []
    for (_, _), before, _ in rest:
        served = {}
        for cell in cells:
            runs = [next(rest) for _ in range(3)]
            first, run, last = (VllmRun(made or [], answer) for (_, made), answer, _ in runs)
            served[cell.name] = VllmCell(run, [first, last])
        _, after, load = next(rest)
        repeats.append(VllmRepeat((before["grid"], after["grid"]), served, load))
    return VllmSession(cells, repeats, about, seconds)


def _answers(python: str, job: dict[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
    """The lines of the program as they come; it is ended if none comes for so long."""
    program = Path(__file__).with_name("vllm_server.py")
    with TemporaryFile() as said:
        try:
            process = Popen([python, str(program)], stdin=PIPE, stdout=PIPE, stderr=said)
        except OSError as error:
            raise ConfigError(f"{VARIABLE}: {python}: {error.strerror or error}") from None
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
            for _ in range(1 + len(job["work"])):
                alarm = threading.Timer(timeout_s, process.kill)
                alarm.start()
                line = process.stdout.readline()
                alarm.cancel()
                if not line:
                    said.seek(0)
                    last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
                    raise ConfigError(f"{python}: vLLM ended early or was silent: {last[-500:]}")
                yield json.loads(line)
        finally:
            process.stdout.close()
            try:
                process.wait(timeout=10)
            except TimeoutExpired:
                process.kill()
                process.wait()
