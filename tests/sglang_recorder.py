"""SGLang's scheduler as ``tests/recorder.py`` records it: its event loops, its prefix cache and its
allocators, around a worker that is a stand-in. It needs SGLang 0.5.23."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import random
import sys
from array import array
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from tests.recorder import EOS

FORKED = True
NOT_NEEDED = {"torchvision", "sgl_kernel"}
"""What SGLang imports, and its scheduler never uses."""


@dataclass(frozen=True)
class Settings:
    """SGLang's settings as a log names them, and (the last eight) a workload.

    Prompts of a group (of so many) share a prefix; ``eos`` ends requests before their declared
    length; ``ties`` makes them arrive together.
    """

    page_size: int = 1
    capacity: int = 2000
    context_length: int = 1024
    chunked_prefill_size: int = 128
    max_prefill_tokens: int = 16384
    max_running_requests: int = 16
    schedule_conservativeness: float = 1.0
    schedule_policy: str = "fcfs"
    enable_mixed_chunk: bool = False
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    scheduler_recv_interval: int = 1
    ignore_eos: bool = False
    requests: int = 32
    rate: float = 60.0
    max_prompt: int = 200
    max_output: int = 60
    groups: int = 0
    eos: bool = False
    ties: bool = False


TIGHT = Settings(capacity=480, schedule_conservativeness=0.1, max_prompt=80, rate=150.0)
SHIPPED = {
    "plain": Settings(disable_overlap_schedule=True),
    "overlap_eos": replace(TIGHT, eos=True),
    "mixed": replace(TIGHT, enable_mixed_chunk=True, chunked_prefill_size=64, page_size=4),
    "groups": replace(TIGHT, groups=3, page_size=8, capacity=640),
    "lpm": replace(TIGHT, groups=2, schedule_policy="lpm", capacity=600, ties=True),
    "lof": replace(TIGHT, schedule_policy="lof", chunked_prefill_size=-1, max_prefill_tokens=300),
    "ignore_eos": replace(TIGHT, ignore_eos=True, disable_radix_cache=True),
    "recv": Settings(scheduler_recv_interval=4, rate=30.0, page_size=16),
}


def random_settings(draw: random.Random) -> Settings:
    groups = draw.choice([0, 0, 1, 3])
    return Settings(
        page_size=draw.choice([1, 1, 4, 16]),
        capacity=draw.choice([480, 768, 2048]) + 256 * (groups > 0),
        chunked_prefill_size=draw.choice([-1, 64, 128]),
        max_prefill_tokens=draw.choice([300, 16384]),
        max_running_requests=draw.choice([4, 8, 16, 32]),
        schedule_conservativeness=draw.choice([0.03, 0.3, 1.0, 1.3]),
        schedule_policy=draw.choice(["fcfs", "fcfs", "lof", "lpm"]),
        enable_mixed_chunk=draw.random() < 0.4,
        disable_overlap_schedule=draw.random() < 0.5,
        disable_radix_cache=draw.random() < 0.25,
        scheduler_recv_interval=draw.choice([1, 1, 1, 4]),
        ignore_eos=draw.random() < 0.25,
        rate=draw.choice([20.0, 80.0, 400.0]),
        max_prompt=draw.choice([60, 150]),
        max_output=draw.choice([20, 60, 120]),
        groups=groups,
        eos=draw.random() < 0.4,
        ties=draw.random() < 0.3,
    )


def workload(settings: Settings, seed: int) -> list[list[Any]]:
    draw = random.Random(seed)
    prefixes = [draw.choice([33, 64, 96, 130]) for _ in range(4)]
    rows: list[list[Any]] = []
    now = 0.0
    for number in range(settings.requests):
        now += draw.expovariate(settings.rate)
        group = draw.randrange(settings.groups) if settings.groups and draw.random() < 0.8 else -1
        shared = prefixes[group] if group >= 0 else 0
        prompt = shared + draw.randint(1, settings.max_prompt)
        output = draw.randint(1, settings.max_output)
        arrival = round(now, 1 if settings.ties else 6)
        row = [number, arrival, prompt, output, 0, group, shared]
        if settings.eos:
            row.append(output + draw.choice([0, 1, 3, 40]))
        rows.append(row)
    return rows


def prompt_tokens(row: list[Any]) -> list[int]:
    """A token is named by its place in its group's prefix, or in its own prompt. No two requests
    begin their own parts alike."""
    number, prompt, group, shared = row[0], row[2], row[5], row[6]
    common = random.Random(f"group {group}").choices(range(3, 15_000), k=shared)
    own = random.Random(f"own {number}").choices(range(3, 31_000), k=prompt - shared - 1)
    return [*common, 15_000 + number, *own]


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in NOT_NEEDED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        class Mock(ModuleType):
            __path__ = ()

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return MagicMock()

        return Mock(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


def worker_of(settings: Settings) -> Any:
    import torch
    from sglang.srt.managers import scheduler as module
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    page, size = settings.page_size, settings.capacity
    requests = ReqToTokenPool(
        settings.max_running_requests, settings.context_length + 8, "cpu", False
    )
    cache = MHATokenToKVPool(
        size, page, torch.float32, 1, 2, 1, "cpu", False, enable_alt_stream=False
    )
    plain = page == 1
    allocator = (
        TokenToKVPoolAllocator(size, torch.float32, "cpu", cache, False)
        if plain
        else PagedTokenToKVPoolAllocator(size, page, torch.float32, "cpu", cache, False)
    )
    runner = MagicMock(
        req_to_token_pool=requests, token_to_kv_pool=cache, token_to_kv_pool_allocator=allocator,
        device="cpu", forward_stream=torch.cpu.Stream(), mtp_draft_device_pools=(),
        mtp_draft_mamba_pools=(), canary_manager=None, prefill_aware_swa=False,
        is_hybrid_swa=False, spec_algorithm=module.SpeculativeAlgorithm.from_string(None),
        attn_backend=SimpleNamespace(extend_attention_block_m=64, needs_cpu_seq_lens=True),
        shared_read_done_event=None,
        ngram_embedding_manager=SimpleNamespace(prepare_for_forward=lambda batch, **_: batch),
    )  # fmt: skip
    return SimpleNamespace(
        preloaded_weights_bytes=0, graph_memory_usage={}, is_hybrid_swa=False,
        sliding_window_size=None, model_runner=runner, last_shared_read_runner=runner,
        get_memory_pool=lambda: (requests, allocator),
    )  # fmt: skip


def build_scheduler(settings: Settings, model: Path) -> Any:
    import torch
    from sglang.srt.managers import scheduler as module
    from sglang.srt.runtime_context import SpawnRanks, get_context, get_parallel, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    names = list(asdict(settings))
    engine = {name: getattr(settings, name) for name in names[3 : names.index("ignore_eos")]}
    arguments = ServerArgs(
        model_path=str(model), device="cpu", skip_tokenizer_init=True, load_format="dummy",
        attention_backend="torch_native", sampling_backend="pytorch", log_level="error",
        context_length=settings.context_length, mem_fraction_static=0.5,
        max_total_tokens=settings.capacity, page_size=settings.page_size, **engine,
    )  # fmt: skip
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))

    def init_model_worker(self: Any) -> None:
        worker = self.tp_worker = self.model_worker = worker_of(settings)
        worker.model_config = worker.model_runner.model_config = self.model_config
        self.draft_worker = self.external_corpus_manager = self.min_free_slots_delayer = None
        self.kv_cache_allocation_time, self.startup_available_gpu_memory_gb = 0.0, 1.0
        self.schedule_stream, self.forward_stream = torch.cpu.Stream(), torch.cpu.Stream()
        self.max_total_num_tokens = settings.capacity
        self.max_prefill_tokens = settings.max_prefill_tokens
        self.max_running_requests = settings.max_running_requests
        self.max_queued_requests = self.pad_input_ids_func = None
        self.max_req_len = min(settings.context_length, settings.capacity) - 1
        self.max_req_input_len = self.max_req_len - 5
        self.random_seed, self.device, self._war_barrier_enabled = 0, "cpu", False
        most = settings.max_running_requests
        get_context().override("recorder", pp_max_micro_batch_size=most)
        ranks = get_parallel()
        for name in ("tp", "attn_tp", "attn_cp"):
            group = getattr(ranks, f"{name}_group")
            setattr(self, f"{name}_group", group)
            setattr(self, f"{name}_cpu_group", group.cpu_group)
        self.pp_group, self.world_group = ranks.pp_group, ranks.world_group
        self.dp_tp_group = module.get_dp_tp_group()
        self.dp_tp_cpu_group = self.dp_tp_group.cpu_group

    kind = module.Scheduler
    kind.init_model_worker = init_model_worker
    kind.init_startup_timing_summary = lambda self: None
    kind.publish_load_snapshot = lambda self, force=False: None
    # Its other work is checks and metrics.
    kind.on_idle = lambda self: self.is_fully_idle() and self.new_token_ratio_tracker.reset()
    return kind(arguments, PortArgs.init_new(arguments))


class Served(Exception):
    """Every request is served."""


class Recording:
    """The scheduler's own event loop on a virtual clock, watched."""

    def __init__(self, settings: Settings, rows: list[list[Any]], model: Path) -> None:
        from sglang.srt.managers.scheduler_components.recv_skipper import SchedulerRecvSkipper

        self.settings, self.rows = settings, rows
        scheduler = self.scheduler = build_scheduler(settings, model)
        self.coming = deque(rows)
        self.now = 0.0
        self.steps = 0
        self.launched: deque[int] = deque()
        self.retracted: list[int] = []
        self.events: list[list[Any]] = []
        self.skipper = SchedulerRecvSkipper.maybe_create()
        self._next, self._run = scheduler.get_next_batch_to_run, scheduler.run_batch
        self._book, self._queue = scheduler.process_batch_result, scheduler._add_request_to_queue
        scheduler.ingest_requests = self.receive
        scheduler.get_next_batch_to_run = self.schedule
        scheduler.run_batch, scheduler.process_batch_result = self.launch, self.book
        scheduler._add_request_to_queue = self.queue
        scheduler.tp_worker.forward_batch_generation = self.forward
        scheduler.load_publisher = SimpleNamespace(publish_load_stat=lambda *_, **__: None)
        scheduler.metrics_reporter.log_batch_result_stats = lambda *_, **__: None
        scheduler.load_inquirer = SimpleNamespace(
            _get_num_pending_tokens=lambda **_: 0, get_loads=None
        )

    def run(self) -> None:
        scheduler = self.scheduler
        try:
            if self.settings.disable_overlap_schedule:
                scheduler.event_loop_normal()
            else:
                scheduler.event_loop_overlap()
        except Served:
            pass

    def receive(self, **_: Any) -> list[Any]:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        s = self.scheduler
        if self.skipper is not None and not self.skipper.handle(s.last_batch):
            return []
        if not (
            s.running_batch.reqs or s.waiting_queue or s.chunked_req or s.last_batch
            or s.result_queue
        ):  # fmt: skip
            if not self.coming:
                raise Served
            self.now = max(self.now, self.coming[0][1])
        while self.coming and self.coming[0][1] <= self.now:
            row = self.coming.popleft()
            sampling = SamplingParams(
                max_new_tokens=row[7] if len(row) > 7 else row[3],
                ignore_eos=self.settings.ignore_eos, stop_token_ids=[EOS], temperature=0.0,
            )  # fmt: skip
            sampling.normalize(None)
            request = TokenizedGenerateReqInput(
                rid=str(row[0]), input_text=None, input_ids=array("q", prompt_tokens(row)),
                input_embeds=None, mm_inputs=None, token_type_ids=None, sampling_params=sampling,
                return_logprob=False, logprob_start_len=-1, top_logprobs_num=0,
                token_ids_logprob=None, stream=False,
            )  # fmt: skip
            s.process_input_requests([request])
            self.events.append(["add", row[0]])
        return []

    def queue(self, request: Any, is_retracted: bool = False) -> Any:
        if is_retracted:
            self.retracted.append(int(request.rid))
        return self._queue(request, is_retracted=is_retracted)

    def schedule(self, **given: Any) -> Any:
        s = self.scheduler
        self.retracted.clear()
        plan = self._next(**given)
        batch, kind, rows = plan.batch_to_run, None, []
        if batch is not None and batch.forward_mode.is_extend():
            kind = "mixed" if batch.forward_mode.is_mixed() else "extend"
            rows = [
                [int(r.rid), int(before), int(tokens)]
                for r, before, tokens in zip(
                    batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True
                )
            ]
        elif batch is not None:
            kind = "decode"
            lengths = zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)
            rows = [[int(r.rid), length - 1, 1] for r, length in lengths]
        self.now += (0.004 + 2e-5 * sum(row[2] for row in rows)) if rows else 0.0
        free = s.token_to_kv_pool_allocator.available_size() + s.tree_cache.evictable_size()
        cut = -1 if s.chunked_req is None else int(s.chunked_req.rid)
        running = plan.running_batch
        self.events.append([
            "schedule", self.steps, kind, rows, sorted(self.retracted), free, len(running.reqs),
            len(s.waiting_queue), round(s.new_token_ratio_tracker.current, 6), cut,
            bool(running.batch_is_full),
        ])  # fmt: skip
        if batch is None:
            self.events.append(["return", self.steps, []])
        self.steps += 1
        if self.steps > 20_000:
            raise RuntimeError("the scheduler goes round for ever")
        return plan

    def launch(self, batch: Any, *given: Any, **named: Any) -> Any:
        self.launched.append(self.steps - 1)
        return self._run(batch, *given, **named)

    def forward(self, batch: Any, **_: Any) -> Any:
        """A token for each request; the last one is EOS where it ends the request."""
        import torch
        from sglang.srt.managers.utils import GenerationBatchResult

        tokens = []
        for request, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            row = self.rows[int(request.rid)]
            generated = length - row[2]  # known, or on their way
            last = len(row) > 7 and generated + 1 >= row[3]
            tokens.append(EOS if last else 3 + (row[0] * 7919 + max(generated, 0)) % 30_000)
        return GenerationBatchResult(next_token_ids=torch.tensor(tokens, dtype=torch.int64))

    def book(self, batch: Any, result: Any) -> Any:
        before = [request for request in batch.reqs if not request.finished()]
        booked = self._book(batch, result)
        ended = sorted(int(request.rid) for request in before if request.finished())
        self.events.append(["return", self.launched.popleft(), ended])
        return booked


def load() -> str:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    import transformers.utils.import_utils as found

    found.is_torchvision_available()  # asks for the real one
    found.is_torchvision_greater_or_equal = lambda *_, **__: False
    sys.meta_path.append(StandIns())
    importlib.import_module("sglang.srt.managers.scheduler")
    return str(importlib.import_module("sglang").__version__)
