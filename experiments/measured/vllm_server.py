"""A program for a Python with vLLM: serves work on vLLM's engine in one process and times it.

    PYTHON vllm_server.py < JOB.json

It needs nothing of this project but its standard library. The job has ``model`` (a Hugging Face
configuration), ``engine`` (arguments of vLLM's ``EngineArgs``) and ``work``: items of

    {"serve": [[arrival_s, prompt, output], ...]}     requests over time
    {"grid": {"decodes": [...], "contexts": [...], "prompts": [...], "times": N}}

For each item a line of JSON goes to stdout. **Its clock is the CPU time of this process**, without
idle time: with no request to serve it jumps to the next arrival. So other programs delay the run
but hardly change it. ``wall_s`` is the item's time by the wall clock.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
WIDEST_TOKEN = 2000
"""Prompts are random tokens up to this number."""


class Server:
    """vLLM's engine, its decisions and its steps.

    ``events`` has the form of a log of decisions (``experiments/run/decision_log.py``), ``steps``
    rows of clocks: before a step's requests were added, after that, and at the step's end.
    """

    def __init__(self, model: Path, settings: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            model=str(model), load_format="dummy", skip_tokenizer_init=True, dtype="float32",
            enforce_eager=True, seed=0, disable_log_stats=True, **settings,
        )  # fmt: skip
        self.engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.draw = random.Random(0)
        self.events: list[list[Any]] = []
        self.steps: list[list[float]] = []
        self.idle_s = 0.0
        self._decisions = 0
        self._watch()

    def _watch(self) -> None:
        scheduler = self.scheduler
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def watched_schedule(*given: Any, **more: Any) -> Any:
            output = schedule(*given, **more)
            computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
            again = output.scheduled_cached_reqs
            computed |= dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
            rows = [[_number(i), computed[i], n] for i, n in output.num_scheduled_tokens.items()]
            preempted = sorted(map(_number, output.preempted_req_ids or ()))
            free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            state = [free, len(scheduler.running), len(scheduler.waiting)]
            self.events.append(["schedule", self._decisions, rows, preempted, *state])
            return output

        def watched_update(*given: Any, **more: Any) -> Any:
            before = set(scheduler.requests)
            outputs = update(*given, **more)
            ended = sorted(map(_number, before - set(scheduler.requests)))
            self.events.append(["return", self._decisions, ended])
            self._decisions += 1
            return outputs

        scheduler.schedule, scheduler.update_from_output = watched_schedule, watched_update

    def now(self) -> float:
        """The clock, in seconds."""
        return time.process_time() + self.idle_s

    def add(self, number: int, prompt: int, output: int) -> None:
        """Hand over a request of random tokens."""
        from vllm import SamplingParams

        tokens = [self.draw.randrange(3, WIDEST_TOKEN) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False)
        self.events.append(["add", number])
        self.engine.add_request(str(number), {"prompt_token_ids": tokens}, sampling)

    def serve(self, rows: list[list[Any]]) -> dict[str, Any]:
        """Serve requests as they arrive; times count from when the first step may begin."""
        self.events, self.steps, self._decisions = [], [], 0
        times = [[0.0, 0.0] for _ in rows]
        start, coming = self.now(), 0
        while coming < len(rows) or self.engine.has_unfinished_requests():
            if not self.engine.has_unfinished_requests():
                self.idle_s += max(0.0, start + rows[coming][0] - self.now())
            before = self.now() - start
            while coming < len(rows) and rows[coming][0] <= self.now() - start:
                self.add(coming, *rows[coming][1:])
                coming += 1
            added = self.now() - start
            outputs = self.engine.step()
            end = self.now() - start
            self.steps.append([before, added, end])
            for output in outputs:
                number = _number(output.request_id)
                if output.outputs[0].token_ids:
                    times[number][0] = times[number][0] or end
                    times[number][1] = end
        return {"events": self.events, "steps": self.steps, "times": times}

    def grid(self, decodes: list[int], contexts: list[int], prompts: list[int], times: int) -> Any:
        """Rows of decodes, their mean context, tokens of a new prompt, seconds with and without the
        time to add it. A step of ``prompts`` 0 has decodes alone."""
        rows, number = [], 0
        for context in contexts:
            for count in decodes:
                first = number
                for _ in range(count):
                    self.add(number, context, len(prompts) * times + 100)
                    number += 1
                while any(r.num_output_tokens == 0 for r in self.scheduler.requests.values()):
                    self.engine.step()
                for _ in range(times):
                    for prompt in self.draw.sample(prompts, len(prompts)):
                        if not (count or prompt):
                            continue
                        held = [r.num_computed_tokens for r in self.scheduler.requests.values()]
                        before = self.now()
                        if prompt:
                            self.add(number, prompt, 1)
                            number += 1
                        added = self.now()
                        self.engine.step()
                        end = self.now()
                        mean = sum(held) / count if count else context
                        rows.append([count, mean, prompt, end - before, end - added])
                running = list(self.scheduler.requests)
                self.engine.abort_request([str(each) for each in range(first, number)])
                if running and self.scheduler.requests:
                    raise RuntimeError("vLLM did not abort requests of the grid")
        return {"grid": rows}


def _number(name: str) -> int:
    """The request's number; vLLM may append a suffix to it."""
    return int(str(name).partition("-")[0])


def main() -> None:
    """Do the job on stdin."""
    os.environ.update(QUIET)
    job = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # vLLM may print
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(job["model"]))
        import vllm

        server = Server(Path(folder), job["engine"])
        about = {"vllm": vllm.__version__, "python": sys.version.split()[0]}
        blocks = server.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        print(json.dumps(about | {"num_blocks": blocks}), file=out, flush=True)
        for item in job["work"]:
            began, cpu = time.perf_counter(), time.process_time()
            done = server.serve(item["serve"]) if "serve" in item else server.grid(**item["grid"])
            done |= {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
            print(json.dumps(done), file=out, flush=True)


if __name__ == "__main__":
    main()
