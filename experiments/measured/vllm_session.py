"""Real vLLM on the CPU, in a Python of its own: its session, and its runs beside the simulator.

:mod:`sarathi_sim.experiments.measured.vllm_server` is the program that serves; it is started once,
and never imported here with vLLM in it. Its steps are predicted from a grid of its own steps.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryFile
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from scipy.interpolate import RegularGridInterpolator

from sarathi_sim.experiments.config.scenario import Validation
from sarathi_sim.experiments.measured.session import (
    Cell,
    Comparison,
    Plan,
    Repeat,
    Session,
    middle,
    plan_of,
    repeats_of,
)
from sarathi_sim.experiments.run.decision_log import ENGINES, DecisionLog, replay
from sarathi_sim.policies.batch import Batch
from sarathi_sim.policies.request import Request
from sarathi_sim.policies.vllm import Vllm
from sarathi_sim.profiler.facts.model import ModelSpec
from sarathi_sim.profiler.storage.child import Progress
from sarathi_sim.profiler.storage.strict import UserError
from sarathi_sim.simulator.loop.clock import quantize
from sarathi_sim.simulator.loop.records import Floats, Records, Switches
from sarathi_sim.simulator.loop.simulation import simulate
from sarathi_sim.simulator.views.metrics import Analysis

VARIABLE = "SARATHI_SIM_VLLM_PYTHON"
"""The environment variable that names the Python with vLLM, if this one lacks it."""
TIMES = 5
"""Repetitions of each cell of the grid."""
SHORT = 16
"""Tokens of the grid's shorter contexts."""
COLUMNS = ("decodes", "context", "prompt", "seconds", "step_s")
"""Columns of a grid's rows; ``seconds`` includes the time to add the prompt's request."""

Answer = dict[str, Any]
"""The program's answer for a grid or a workload."""


def find_python() -> str:
    """The Python with vLLM. Raises UserError if there is none."""
    found = os.environ.get(VARIABLE) or (sys.executable if importlib.util.find_spec("vllm") else "")
    if not found:
        raise UserError(
            f"no vLLM: install the extra (pip install 'sarathi-sim[vllm]'), or name in {VARIABLE} "
            "a Python with it (docs/lockstep.md)"
        )
    return found


def check_cells(cells: Sequence[Cell]) -> None:
    """Raises UserError for settings that this engine does not run, or not in one process."""
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
    # All sequences must fit into the blocks, with their generated tokens and a prompt beside them.
    size = arguments["block_size"]
    fitting = (arguments["num_gpu_blocks_override"] - 1) * size - room
    context = min(longest, fitting // max(most, 1) - TIMES * len(prompts) - size)
    if context <= SHORT:
        problem = f"too few: the grid holds {most} sequences at a time"
        raise cells[0].source.error(
            "kv_cache.num_blocks", arguments["num_gpu_blocks_override"], problem
        )
    return {"decodes": decodes, "contexts": [SHORT, context], "prompts": prompts, "times": TIMES}


def job_of(cells: Sequence[Cell], plan: Plan) -> dict[str, Any]:
    """The program's job."""
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
    """Run the whole session. Raises UserError if vLLM is missing, fails, or stays silent."""
    python, began = find_python(), time.perf_counter()
    plan = list(chain.from_iterable(plan_of(cells, settings)))
    answers, loads = list[Answer](), list[float]()
    for answer in _answers(python, job_of(cells, plan), timeout_s):
        progress("runs of the engine", len(answers), len(plan))
        answers.append(answer)
        loads.append(os.getloadavg()[0])
    return session_of(cells, plan, answers, loads, time.perf_counter() - began)


def session_of(
    cells: list[Cell],
    plan: Plan,
    answers: Sequence[Answer],
    loads: Sequence[float],
    seconds: float,
) -> VllmSession:
    """The session of the program's answers (the first describes it), in the order of the plan."""
    engine, *done = answers
    repeats, _ = repeats_of(plan, done, loads[1:])
    # The difference of a run's wall time and its CPU time was spent by other programs.
    shares = [
        float(run["wall_s"] / run["cpu_s"])
        for (_, requests), run in list(zip(plan, done, strict=True))[2:]
        if requests is not None
    ]
    about = {"engine": engine, "wall_over_cpu": middle(shares)}
    return VllmSession("vllm", cells, repeats, {}, seconds, about)


def _answers(python: str, job: dict[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
    """The lines of the program as they come; it is ended after ``timeout_s`` without one."""
    program = Path(__file__).with_name("vllm_server.py")
    with TemporaryFile() as said:
        try:
            process = Popen([python, str(program)], stdin=PIPE, stdout=PIPE, stderr=said)
        except OSError as error:
            raise UserError(f"{VARIABLE}: {python}: {error.strerror or error}") from None
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
                    raise UserError(f"{python}: vLLM ended early or was silent: {last[-500:]}")
                yield json.loads(line)
        finally:
            process.stdout.close()
            try:
                process.wait(timeout=10)
            except TimeoutExpired:
                process.kill()
                process.wait()


# Predictions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step; each request that it adds takes ``add_s`` more."""

    surface: RegularGridInterpolator
    add_s: float

    @staticmethod
    def of(*grids: Sequence[Sequence[float]]) -> StepTimes:
        """Step times from the rows of grids; medians over the repetitions of each cell.

        The first half of a grid's rows have the short contexts.
        """
        tables = [pd.DataFrame(rows, columns=list(COLUMNS)) for rows in grids]
        table = pd.concat([each.assign(long=each.index >= len(each) // 2) for each in tables])
        decodes, prompts = sorted(table["decodes"].unique()), sorted(table["prompt"].unique())
        contexts = table[table["decodes"] > 0].groupby("long")["context"].median().to_numpy()
        cells = table.groupby(["decodes", "long", "prompt"])["step_s"].median()
        values = cells.unstack().to_numpy(copy=True).reshape(len(decodes), 2, len(prompts))
        prefill = table[table["decodes"] == 0].groupby("prompt")["step_s"].median()
        one, two = prompts[1:3]  # the time of an empty step, extrapolated from few tokens
        nothing = prefill[one] - (prefill[two] - prefill[one]) * one / (two - one)
        values[0] = [nothing, *prefill]
        surface = RegularGridInterpolator(
            (decodes, contexts, prompts), values, bounds_error=False, fill_value=None
        )
        added = table[table["prompt"] > 0]
        return StepTimes(surface, float((added["seconds"] - added["step_s"]).median()))

    def __call__(self, steps: Floats) -> Floats:
        """Seconds of steps: rows of decodes, their mean context, prompt tokens, requests added."""
        rows = np.atleast_2d(steps)
        return np.asarray(self.surface(rows[:, :3]) + self.add_s * rows[:, 3])


def steps_of(run: Answer, requests: Sequence[Request]) -> Floats:
    """The measured steps as :class:`StepTimes` takes them."""
    prompt = {request.id: request.prompt_tokens for request in requests}
    rows = []
    for event in run["events"]:
        if event[0] != "schedule":
            continue
        batch = event[2]
        contexts = [done for number, done, _ in batch if done >= prompt[number]]
        chunks = [(done, tokens) for number, done, tokens in batch if done < prompt[number]]
        mean = sum(contexts) / len(contexts) if contexts else 0.0
        tokens = sum(tokens for _, tokens in chunks)
        rows.append([len(contexts), mean, tokens, sum(done == 0 for done, _ in chunks)])
    return np.array(rows, float)


def seconds_of(run: Answer) -> Floats:
    """The measured seconds of its steps, with the time to add their requests."""
    steps = np.array(run["steps"])
    return np.asarray(steps[:, 2] - steps[:, 0])


def between_s(run: Answer) -> float:
    """Median seconds from one step's end to the next one's begin."""
    steps = np.array(run["steps"])
    gaps = steps[1:, 0] - steps[:-1, 2]
    return float(np.median(gaps)) if len(gaps) else 0.0


@dataclass(frozen=True)
class StepPrediction:
    """``offset_s + factor *`` the grid's time of a step; (0, 1) is the grid alone."""

    cell: Cell
    times: StepTimes
    turnaround_s: float
    offset_s: float = 0.0
    factor: float = 1.0

    def of(self, steps: Floats) -> Floats:
        """Seconds of steps; see :meth:`StepTimes.__call__`."""
        return np.asarray(np.maximum(0.0, self.offset_s + self.factor * self.times(steps)))

    def __call__(self, batch: Batch) -> tuple[float, float, float, float]:
        """What the simulator asks; see :class:`~sarathi_sim.simulator.loop.replica.Predictor`."""
        decodes = batch.num_decodes
        mean = batch.decode_context / decodes if decodes else 0.0
        added = sum(context == 0 for _, _, context in batch.chunks)
        step = np.array([decodes, mean, batch.prefill_tokens, added], float)
        return float(quantize(self.of(step)[0])), 0.0, 0.0, 0.0

    def simulate(self, requests: Sequence[Request]) -> Records:
        """The open loop, without any number of the measured run."""
        pools = [self.cell.scheduler(requests)]
        return simulate(
            requests, pools, self, (1,), switches=Switches(turnaround_s=self.turnaround_s)
        )

    def calibrated(self, runs: Sequence[tuple[Answer, list[Request]]]) -> StepPrediction:
        """The prediction with offset and factor fitted to other runs' steps, by relative errors.

        Errors are relative to the prediction: relative to noisy times they would favour short ones.
        """
        predicted = np.concatenate([self.of(steps_of(*served)) for served in runs])
        measured = np.concatenate([seconds_of(run) for run, _ in runs])
        factor, offset = np.polyfit(predicted, measured, 1, w=1 / predicted)
        return replace(self, offset_s=float(offset), factor=float(factor))


# Measured beside simulated ----------------------------------------------------------------------


_OF_LOG = {
    **{n: n for n in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")},
    "watermark": "watermark",
    "num_blocks": "num_gpu_blocks_override",
    "chunked": "enable_chunked_prefill",
    "caching": "enable_prefix_caching",
    "policy": "scheduling_policy",
    "threshold": "long_prefill_token_threshold",
    "reserve_full_isl": "scheduler_reserve_full_isl",
}
"""The settings of a log of decisions, and their names in ``EngineArgs``."""


def decision_log(cell: Cell, run: Answer, requests: Sequence[Request]) -> DecisionLog:
    """The run's decisions in the form of ``lockstep``."""
    engine, pool = engine_arguments(cell), cell.scenario.policy.described()
    settings = {ours: engine[theirs] for ours, theirs in _OF_LOG.items()} | {
        "adaptive": bool(pool.get("adaptive_threshold")),
        **{"async_sched": False, "v2": False, "pp": 1},
    }
    rows = [[r.id, r.arrival_s, r.prompt_tokens, r.output_tokens, 0, -1, 0] for r in requests]
    version = str(pool.get("version", "0.32"))
    return DecisionLog(Path(cell.name), ENGINES["vllm"], version, 1, settings, rows, run["events"])


def totals_of(arrival: Floats, first: Floats, last: Floats, output: Floats) -> dict[str, float]:
    """Mean TTFT, TPOT (of requests with several tokens) and latency; output tokens a second."""
    many = output > 1
    return {
        "ttft": float((first - arrival).mean()),
        "tpot": float(((last - first)[many] / (output - 1)[many]).mean()),
        "latency": float((last - arrival).mean()),
        "throughput": float(output.sum() / last.max()),
    }


@dataclass(frozen=True)
class VllmSession(Session):
    """The measurements on vLLM."""

    targets: ClassVar[dict[str, float]] = {
        "iteration_error_median": 0.05,
        "iteration_error_p90": 0.15,
        "ttft_error": 0.10,
        "tpot_error": 0.05,
        "throughput_error": 0.05,
    }
    measures: ClassVar[dict[str, str]] = {
        name: name for name in ("ttft", "tpot", "latency", "throughput")
    }
    by_clock: ClassVar[bool] = True

    def drift(self, repeat: Repeat) -> float:
        before, after = (
            pd.DataFrame(grid["grid"]).groupby([0, 2])[4].median().to_numpy()
            for grid in repeat.grids
        )
        return float(np.median(after / before))

    def evaluate(self, repeat: Repeat, cell: Cell) -> Comparison:
        served, requests = repeat.served[cell.name], cell.requests()
        run: Answer = served.run
        grid = StepTimes.of(*(grid["grid"] for grid in repeat.grids))
        turnaround = float(np.median([between_s(run) for run, _ in served.calibration]))
        alone = StepPrediction(cell, grid, turnaround)
        predictions = {"grid": alone, "calibrated": alone.calibrated(served.calibration)}
        steps, whole = steps_of(run, requests), {}
        for name, prediction in predictions.items():
            found = Analysis(prediction.simulate(requests)).request_columns
            arrival = found["arrival_s"]
            first, last = arrival + found["ttft_s"], arrival + found["latency_s"]
            whole[name] = totals_of(arrival, first, last, found["output_tokens"])
        arrivals = np.array([request.arrival_s for request in requests])
        outputs = np.array([request.output_tokens for request in requests])
        times = np.array(run["times"])
        return Comparison(
            parity=replay(decision_log(cell, run, requests)),
            steps=pd.DataFrame(steps, columns=["decodes", "context", "prompt_tokens", "added"]),
            measured_iterations=seconds_of(run),
            iterations={name: each.of(steps) for name, each in predictions.items()},
            measured=totals_of(arrivals, times[:, 0], times[:, 1], outputs),
            whole=whole,
        )
