"""vLLM's scheduler as ``tests/recorder.py`` records it."""

from __future__ import annotations

import os
import random
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.recorder import EOS

FORKED = False
"""Whether each log needs a process of its own."""


@dataclass(frozen=True)
class Settings:
    """vLLM's settings as a log names them, and (after ``pp``) a workload.

    ``share`` of the requests begin with a prefix of one of three groups; ``eos`` ends requests
    before their declared length; ``ties`` makes them arrive together. With the ``mode`` ``pd`` all
    of a prompt but its last token comes from elsewhere, after about ``transfer`` seconds; with
    ``decode_bench`` it is vLLM's own connector for benchmarks that says so, and it takes no time.
    """

    block_size: int = 16
    num_blocks: int = 1000
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    max_model_len: int = 1024
    chunked: bool = True
    caching: bool = False
    policy: str = "fcfs"
    threshold: int = 0
    adaptive: bool = False
    watermark: float = 0.0
    reserve_full_isl: bool = True
    async_sched: bool = False
    v2: bool = False
    pp: int = 1
    requests: int = 40
    per_second: float = 60.0
    longest_prompt: int = 300
    longest_output: int = 40
    share: float = 0.0
    eos: bool = False
    ties: bool = False
    mode: str | None = None
    transfer: float = 0.0

    @property
    def log_mode(self) -> str | None:
        return self.mode


@dataclass(frozen=True)
class Drafting(Settings):
    """With ``k`` drafts for a decode, of which each holds with probability ``accept``, and
    ``lookahead`` tokens for which the drafter needs KV: k for MTP and EAGLE, none for n-grams. With
    ``draft_slots`` 1 a draft model drafts, and its lookahead is k."""

    k: int = 3
    accept: float = 0.7
    lookahead: int = 0
    draft_slots: int = 0

    @property
    def log_mode(self) -> str | None:
        return f"{self.mode or ''} spec".strip()


FEW = Settings(num_blocks=30, requests=36, per_second=150.0, longest_output=60)
DRAFTS = Drafting(**{**asdict(FEW), "num_blocks": 80, "block_size": 8, "caching": True})
SHIPPED = {
    "plain": Settings(requests=50),
    "few_blocks": FEW,
    "shared_prefixes": replace(FEW, caching=True, share=0.8, block_size=8, num_blocks=72),
    "priorities": replace(FEW, policy="priority", ties=True),
    "threshold": Settings(threshold=48, adaptive=True, longest_prompt=500, policy="priority"),
    "pp2": replace(FEW, pp=2, num_blocks=50, reserve_full_isl=False),
    "async_eos": replace(FEW, async_sched=True, eos=True, caching=True, share=0.5, num_blocks=40),
    "async_pp2_v2": replace(
        FEW, async_sched=True, v2=True, pp=2, eos=True, num_blocks=60, reserve_full_isl=False
    ),
    "watermark": replace(FEW, watermark=0.1, reserve_full_isl=False),
    "not_chunked": Settings(chunked=False, max_num_batched_tokens=1024, max_num_seqs=8),
    "drafts": replace(DRAFTS, num_blocks=32, block_size=16, caching=False),
    "drafts_async": replace(DRAFTS, share=0.6, async_sched=True, eos=True, lookahead=3),
    "drafts_cached": replace(DRAFTS, share=0.8, k=5, policy="priority", max_num_batched_tokens=64),
    "pd": replace(FEW, mode="pd", transfer=0.05, longest_output=90),
    "pd_shared_prefixes": replace(
        FEW, mode="pd", transfer=0.02, caching=True, share=0.7, watermark=0.05, num_blocks=56,
        block_size=8, reserve_full_isl=False, policy="priority", longest_prompt=100,
    ),
    # (No shared prefixes, no prompts of one token: this connector fills each request once; if there
    # was nothing to fill at first, then after a preemption.)
    "decode_bench": replace(FEW, mode="decode_bench", caching=True, threshold=40),
    "drafts_pd": replace(
        DRAFTS, num_blocks=72, share=0.6, longest_prompt=150, mode="pd", transfer=0.03, lookahead=3
    ),
    "drafts_model": replace(
        DRAFTS, share=0.6, max_num_batched_tokens=64, lookahead=3, draft_slots=1
    ),
    "drafts_model_async": replace(
        DRAFTS, share=0.8, k=2, policy="priority", threshold=40, max_num_batched_tokens=50,
        lookahead=2, async_sched=True, eos=True, draft_slots=1,
    ),
}  # fmt: skip
CONNECTORS = {
    "pd": {
        "kv_connector": "PromptsFromElsewhere",
        "kv_connector_module_path": "tests.vllm_connector",
    },
    "decode_bench": {"kv_connector": "DecodeBenchConnector"},
}


def random_settings(draw: random.Random) -> Settings:
    """Any mixture of settings under which every request can be served."""
    mode = draw.choice(["sync", "pp", "async", "v2", "v2_pp", "pd", "pd"])
    chunked = draw.random() < 0.85
    block_size = draw.choice([4, 8, 16, 32])
    length = draw.choice([120, 260, 420])
    output = draw.choice([4, 30, 90])
    threshold = draw.choice([0, 0, 17, 40, 100])
    sequences = draw.choice([3, 8, 24])
    caching = draw.random() < 0.5
    most = length + 130 + output + 20  # prompts behind a shared prefix are longer
    found = Settings(
        block_size=block_size,
        num_blocks=2 + int(most / block_size * draw.choice([1.05, 1.3, 2.2, 6.0])),
        max_num_seqs=sequences,
        max_num_batched_tokens=draw.choice([32, 90, 300]) if chunked else 1024,
        chunked=chunked,
        caching=caching,
        policy=draw.choice(["fcfs", "priority"]),
        threshold=threshold,
        adaptive=threshold > 0 and draw.random() < 0.5,
        watermark=draw.choice([0.0, 0.0, 0.03, 0.25]),
        reserve_full_isl=draw.random() < 0.5,
        async_sched=mode in ("async", "v2", "v2_pp"),
        v2=mode in ("v2", "v2_pp"),
        pp=draw.choice([2, 3, 4]) if mode in ("pp", "v2_pp") else 1,
        requests=40,
        per_second=draw.choice([20.0, 80.0, 400.0]),
        longest_prompt=length,
        longest_output=output,
        share=draw.choice([0.4, 0.9]) if caching else 0.0,
        eos=draw.random() < 0.5,
        ties=draw.random() < 0.4,
        mode=mode if mode in CONNECTORS else None,
        transfer=draw.choice([0.003, 0.03, 0.2]),
    )
    if mode in ("sync", "async", "pd") and draw.random() < 0.5:
        k = draw.choice([1, 2, 5])
        drafts = {"lookahead": draw.choice([0, k, k]), "draft_slots": 0}
        drafts["draft_slots"] = draw.choice([0, 1]) if drafts["lookahead"] else 0
        found = Drafting(**asdict(found), k=k, accept=0.6, **drafts)
        return replace(found, num_blocks=found.num_blocks + 2 * k)
    return found


def workload(settings: Settings, seed: int) -> list[list[Any]]:
    """Rows as in a log's header."""
    draw = random.Random(seed)
    prefixes = [draw.choice([33, 64, 96, 130]) for _ in range(3)]
    rows: list[list[Any]] = []
    now = 0.0
    for number in range(settings.requests):
        now += draw.expovariate(settings.per_second)
        group = draw.randrange(3) if draw.random() < settings.share else -1
        shared = prefixes[group] if group >= 0 else 0
        own = draw.choice([0, 1, 16, draw.randint(1, settings.longest_prompt)]) if shared else 0
        prompt = shared + own if shared else draw.randint(1, settings.longest_prompt)
        output = draw.randint(1, settings.longest_output)
        arrival = round(now, 1 if settings.ties else 6)
        row = [number, arrival, prompt, output, draw.randrange(3), group, shared]
        if settings.eos:
            row.append(output + draw.choice([0, 1, 3, 20]))
        rows.append(row)
    return rows


def prompt_tokens(row: list[Any]) -> list[int]:
    """A token is named by its place in its group's prefix, or in its own prompt."""
    number, prompt, group, shared = row[0], row[2], row[5], row[6]
    common = random.Random(f"group {group}").choices(range(3, 31_000), k=shared)
    return common + random.Random(f"own {number}").choices(range(3, 31_000), k=prompt - shared)


def build_scheduler(settings: Settings, model: Path) -> tuple[Any, int]:
    """vLLM's scheduler without an engine, and how many batches may be in flight."""
    import torch
    from vllm import config as c
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    cache = c.CacheConfig(
        block_size=settings.block_size, enable_prefix_caching=settings.caching, cache_dtype="auto"
    )
    target = c.ModelConfig(
        model=str(model), skip_tokenizer_init=True, dtype="float32",
        max_model_len=settings.max_model_len,
    )  # fmt: skip
    parallel, drafts = c.ParallelConfig(pipeline_parallel_size=settings.pp), None
    if isinstance(settings, Drafting):
        ngram = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}
        itself = {"method": "draft_model", "model": str(model)}  # its vocabulary is the same
        drafts = c.SpeculativeConfig(
            **(itself if settings.draft_slots else ngram), num_speculative_tokens=settings.k,
            target_model_config=target, target_parallel_config=parallel,
        )  # fmt: skip
    whole = c.VllmConfig(
        model_config=target,
        cache_config=cache,
        parallel_config=parallel,
        speculative_config=drafts,
        device_config=c.DeviceConfig("cpu"),
        scheduler_config=c.SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=settings.max_model_len,
            enable_chunked_prefill=settings.chunked,
            policy=settings.policy,
            long_prefill_token_threshold=settings.threshold,
            long_prefill_token_threshold_adaptive=settings.adaptive,
            watermark=settings.watermark,
            scheduler_reserve_full_isl=settings.reserve_full_isl,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=settings.mode
        and c.KVTransferConfig(kv_role="kv_both", **CONNECTORS[settings.mode]),
    )  # fmt: skip
    # What the CPU platform refuses, though the scheduler itself has no need of a GPU.
    whole.scheduler_config.async_scheduling = settings.async_sched
    cache.num_gpu_blocks = settings.num_blocks
    spec = FullAttentionSpec(
        block_size=settings.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    scheduler = (AsyncScheduler if settings.async_sched else Scheduler)(
        vllm_config=whole,
        kv_cache_config=KVCacheConfig(
            num_blocks=settings.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(whole),
        block_size=settings.block_size,
        log_stats=False,
    )
    scheduler.use_v2_model_runner = settings.v2
    if isinstance(settings, Drafting) and settings.draft_slots:
        assert scheduler.num_lookahead_tokens == settings.lookahead
    elif isinstance(settings, Drafting) and settings.lookahead:  # as EAGLE, which needs its weights
        scheduler.num_lookahead_tokens = settings.lookahead
        step = 1 + settings.k + settings.lookahead
        scheduler._spec_decode_step_blocks = -(-step // settings.block_size)
        scheduler.kv_cache_manager.coordinator.eagle_group_ids = {0}
    if isinstance(settings, Drafting):
        return scheduler, 1 + settings.async_sched
    if settings.v2 and settings.async_sched:
        return scheduler, settings.pp + 1
    return scheduler, whole.max_concurrent_batches


class Recording:
    """The scheduler as vLLM's engine core drives it, on a virtual clock.

    Batches are scheduled while one more may be in flight, then the oldest is waited for.
    """

    def __init__(self, settings: Settings, rows: list[list[Any]], model: Path) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.settings = settings
        self.rows = rows
        self.hasher = (
            get_request_block_hasher(settings.block_size, sha256) if settings.caching else None
        )
        self.scheduler, self.depth = build_scheduler(settings, model)
        self.coming = deque(sorted(rows, key=lambda row: row[1]))
        self.flight: deque[tuple[float, int, Any, list[str]]] = deque()
        self.yielded = [0] * len(rows)
        self.stages = [0.0] * settings.pp
        self.now = 0.0
        self.steps = 0
        # When the KV of each prompt is there, and whose was said to be.
        self.coming_kv: dict[str, float] = {}
        self.received: set[str] = set()
        self.events: list[list[Any]] = []
        self.draw = random.Random(len(rows))

    def run(self) -> None:
        while self.coming or self.flight or self.scheduler.has_requests():
            if not (self.flight or self.scheduler.has_requests()):
                self.now = max(self.now, self.coming[0][1])
            self._arrivals()
            scheduled = self.scheduler.has_requests() and self._schedule()
            if len(self.flight) < self.depth and (scheduled or self.scheduler.has_requests()):
                continue
            self._book()

    def _arrivals(self) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        while self.coming and self.coming[0][1] <= self.now:
            row = self.coming.popleft()
            most = row[7] if len(row) > 7 else row[3]
            sampling = SamplingParams(max_tokens=most, ignore_eos=True, stop_token_ids=[EOS])
            request = Request(
                str(row[0]), prompt_tokens(row), sampling, None,
                arrival_time=row[1], priority=row[4], block_hasher=self.hasher,
            )  # fmt: skip
            self.scheduler.add_request(request)
            self.events.append(["add", row[0]])

    def _schedule(self) -> bool:
        scheduler = self.scheduler
        output = scheduler.schedule()
        computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
        again = output.scheduled_cached_reqs
        computed |= dict(zip(again.req_ids, again.num_computed_tokens, strict=True))
        given = output.num_scheduled_tokens
        holding = list(scheduler.kv_holding_waiting)
        more = self.settings.log_mode is not None
        drafts = {id: len(each) for id, each in output.scheduled_spec_decode_tokens.items()}
        self.events.append([
            "schedule", self.steps,
            [[int(id), computed[id], n, *[drafts.get(id, 0)] * more] for id, n in given.items()],
            sorted(map(int, output.preempted_req_ids or ())),
            scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            len(scheduler.running), len(scheduler.waiting), *[len(holding)] * more,
        ])  # fmt: skip
        for request in holding:
            if request.status.name == "WAITING_FOR_REMOTE_KVS":
                takes = self.settings.transfer * self.draw.uniform(0.5, 1.5)
                self.coming_kv.setdefault(request.request_id, self.now + takes)
        yields = [id for id in given if not scheduler.requests[id].is_prefill_chunk]
        tokens = output.total_num_scheduled_tokens
        done = self.flight[-1][0] if self.flight else self.now
        if tokens:
            done = self.now
            for stage, free in enumerate(self.stages):
                done = max(done, free) + (3e-3 + 3e-5 * tokens) / len(self.stages)
                self.stages[stage] = done
        elif self.settings.mode:
            done += 1e-3  # the engine goes round while all wait for KV
        self.flight.append((max(done, self.now), self.steps, output, yields))
        self.steps += 1
        if self.steps > 100_000:
            raise RuntimeError("the scheduler goes round for ever")
        return bool(tokens)

    def _book(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        done, step, output, yields = self.flight.popleft()
        self.now = max(self.now, done)
        sampled: dict[str, list[int]] = {id: [] for id in output.num_scheduled_tokens}
        drafts = {id: len(each) for id, each in output.scheduled_spec_decode_tokens.items()}
        for id in yields:
            row = self.rows[int(id)]
            for draft in range(1 + drafts.get(id, 0)):
                if draft and self.draw.random() >= self.settings.accept:
                    break
                self.yielded[int(id)] += 1
                last = len(row) > 7 and self.yielded[int(id)] == row[3]
                token = EOS if last else 3 + (int(id) * 101 + self.yielded[int(id)]) % 30_000
                sampled[id].append(token)
        told = {int(id): len(each) for id, each in sampled.items() if len(each) != 1}
        before = set(self.scheduler.requests)
        index = {id: place for place, id in enumerate(sampled)}
        result = ModelRunnerOutput(list(sampled), index, list(sampled.values()))
        there = {id for id, at in self.coming_kv.items() if at <= self.now} - self.received
        if there:
            result.kv_connector_output = KVConnectorOutput(finished_recving=there)
        self.scheduler.update_from_output(output, result)
        ended = before - set(self.scheduler.requests)
        self.events.append(["return", step, sorted(map(int, ended))])
        if self.settings.log_mode is not None:
            self.events[-1].append(told)
        if there:
            self.received |= there
            self.events.append(["recv", sorted(map(int, there))])
        if isinstance(self.settings, Drafting) and not self.settings.async_sched:
            # (Else every decode is given k.)
            self._propose([id for id in yields if id in self.scheduler.requests])

    def _propose(self, ids: list[str]) -> None:
        from vllm.v1.outputs import DraftTokenIds

        counts = [self.draw.randint(0, self.settings.k) for _ in ids]
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [[5] * n for n in counts]))
        self.events.append(["drafts", dict(zip(map(int, ids), counts, strict=True))])


def load() -> str:
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    import vllm

    return str(vllm.__version__)
