"""Upper bounds of a deployment's rate, from its op times alone, without a simulation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.facts.ops import MOE
from sarathi_sim.simulator.loop.handover import Handover
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.iteration import IterationCost
from sarathi_sim.simulator.op_times.op_times import SUM, OpTimes
from ..config.deployment import Deployment, PoolsDeployment, prompt_of
from ..config.inputs import host_of
from ..config.pools import HANDOVERS, acceptance_of
from ..config.requests import Lengths
from .options import Option
from .slo import Objective

SAMPLE = 64
SLACK = 1.02
"""Slack of a bound, because the best rate is searched on a grid."""
BATCHES = np.unique(np.geomspace(1, 4096, 80).astype(np.int64))
OFTEN = 2.0
"""Safety factor on the rate of slow chunks that Poisson arrivals allow."""
_TOKENS = ("tpot_s", "tbt_s", "tbt_max_s")


class Bounds:
    """Upper bounds of a deployment's rate of served requests.

    The throughput is bounded by the least GPU time of a request: all its tokens at the best rate of
    any batch, its prompt's attention in one piece, its decodes' in the best batch. A limit on the
    time between tokens bounds this batch, and the rate of chunks that alone take longer; latencies
    are bounded by that of a single request. Rejected requests, prompt tokens that are remote or
    that a prefix cache may hold, and the drafter cost nothing. Ranks of attention share the GPU
    time but for the experts', which compute the tokens of all ranks at their best rate. A decode
    has the rows of its drafts, and yields the mean number of tokens (in a latency all of them)."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.cost, self.layers = _cost(deployment), deployment.layers
        lengths, served = Lengths.of(deployment.requests), np.full(len(deployment.requests), True)
        if refused := deployment.refused[0]:
            served = np.array([one.id not in refused for one in deployment.requests])
        own = new_tokens(deployment)[served]
        self.new_tokens = np.minimum(own, lengths.here[served])
        each = slice(None, None, max(1, len(own) // SAMPLE))
        self.prompt = self.new_tokens[each]
        tokens = lengths.output[served][each].astype(np.float64)
        scenario = deployment.scenario
        drafts = 0 if scenario.speculation is None else scenario.speculation.draft_length
        mean = acceptance_of(scenario, deployment.model).mean if drafts else 1.0
        self.per_decode = 1 + drafts  # tokens at most
        self.decodes = (tokens - 1) / mean  # iterations, and below their rows: the first has fewer
        self.decode_rows = np.maximum(self.per_decode * self.decodes - drafts, self.decodes)
        self.rows_each = float(self.decode_rows.sum() / max(self.decodes.sum(), 1e-9)) or 1.0
        held = lengths.prompt[served][each].astype(np.float64)
        self.sequences = scenario.batching.max_batch or 1
        chunking = scenario.policy.build().chunking
        longest = int(held.max())
        self.chunk = chunking.tokens if chunking else longest
        rows = (chunking.rows if chunking else longest) + self.per_decode * self.sequences
        self.sizes = np.unique(np.geomspace(1, rows, 160).astype(np.int64))
        self.context = float((held + tokens / 2).mean())
        self.own_context = float((own[each] + tokens / 2).mean())
        self.linear = _layer(self.cost, self.sizes)
        self.ranks = scenario.cluster.dp
        self.shared = 0.0 * self.sizes  # the part of a layer that takes the tokens of all ranks
        if self.ranks > 1:
            self.shared = self.cost.op_s(MOE, self.sizes)
        self.decode = self.cost.layer.scale * _decodes(self.deployment.ops, self.context)

    @property
    def token_s(self) -> float:
        """The least time per token of a single request."""
        layers = sum(self.layers) * (self.linear[0] + self.decode[0])
        return float(layers + self._edges(np.ones(1))[0]) / self.per_decode

    def _edges(self, rows: Floats) -> Floats:
        links = (len(self.layers) - 1) * self.cost.transfer_s(rows)
        return np.asarray(self.cost.last_s(rows) + self.cost.host_s(rows) + links)

    def requests_per_s(self, most: float = np.inf) -> float:
        """A rate that one replica cannot exceed with at most ``most`` decodes in an iteration."""
        most = max(1, min(self.sequences, self.deployment.kv_capacity // self.own_context, most))
        tried = slice(0, int(np.searchsorted(BATCHES, most)) + 1)
        batches = BATCHES[tried]
        decode = float((self.decode[tried] / batches).min())
        outputs = self.per_decode * batches
        head = float((self.cost.last_s(outputs) / outputs).min())
        own = self.linear - self.shared
        per_row = float((own / self.sizes).min())
        # No iteration has more decodes than sequences, nor takes less than an iteration of one row.
        rows, least = self.prompt + self.decode_rows, self.decodes / most
        rows_s = np.maximum(rows * per_row, least * own[0]) / self.ranks
        if self.ranks > 1:
            sizes = np.unique(np.geomspace(1, self.ranks * self.sizes[-1], 160).astype(np.int64))
            experts_s = float((self.cost.op_s(MOE, sizes) / sizes).min())
            rows_s += np.maximum(rows * experts_s, least / self.ranks * self.shared[0])
        prompts_s = self.cost.layer.scale * _least(self.deployment.ops, tuple(self.prompt))
        of_layer = rows_s + (prompts_s + self.decodes * decode) / self.ranks
        # Each stage runs its part of every request; the last stage also the LM head.
        last = self.layers[-1] * of_layer + (1 + self.decode_rows) * head / self.ranks
        slowest_s = max(float((max(self.layers) * of_layer).mean()), float(last.mean()))
        return SLACK / slowest_s

    def under_all(self, objectives: Sequence[Objective]) -> float:
        """A rate that one replica cannot exceed while it keeps all clauses."""
        return min([self.requests_per_s(), *map(self.under, objectives)])

    def under(self, objective: Objective) -> float:
        """A rate that one replica cannot exceed while it keeps a clause of an SLO."""
        found = [np.inf]
        share = 0.0 if objective.statistic == "mean" else 1 - objective.kept_share
        for metric, limit in objective.limits.items():
            if metric not in _TOKENS:
                continue
            # The rest of the tokens may be in batches of any size.
            most = self._largest_batch(limit * self.per_decode)
            found.append(self.requests_per_s(most) / (1 - share))
            if metric != "tpot_s" and share:
                found.append(self._slow_chunks(limit, share))
        return min(found)

    def _largest_batch(self, limit_s: float) -> int:
        rows = np.interp(self.rows_each * BATCHES, self.sizes, self.linear)
        takes = sum(self.layers) * (rows + self.decode) + self._edges(BATCHES.astype(np.float64))
        return int(BATCHES[min(int((takes <= limit_s * SLACK).sum()), len(BATCHES) - 1)])

    def _slow_chunks(self, limit_s: float, share: float) -> float:
        """The request rate at which slow iterations, whose chunk alone exceeds the limit, delay
        ``share`` of the tokens: their rate times the mean time between tokens, as an arriving
        prompt meets the mean number of decodes. Prompts that arrive meanwhile share the next."""
        takes = sum(self.layers) * self.linear + self._edges(np.ones(1))[0]
        slow = self.sizes[takes > limit_s * SLACK]
        if not len(slow) or slow[0] > self.chunk:
            return float("inf")
        whole, rest = np.divmod(self.prompt, self.chunk)
        chunks = float((whole + (rest >= slow[0])).mean())
        apart_s = self.token_s - share * float(takes[-1])
        if chunks * apart_s <= 0:
            return float("inf")
        return self.ranks * OFTEN * share / (chunks * apart_s)


def new_tokens(deployment: Deployment) -> Floats:
    """Prompt tokens of each request that no earlier request left in a prefix cache."""
    cache, found, seen = deployment.scenario.kv_cache, [], dict[Hashable, int]()
    lengths = Lengths.of(deployment.requests)
    if cache is None or not cache.prefix_caching or not (lengths.prefixed or cache.prompts_cached):
        return lengths.prompt.astype(np.float64)
    for request in deployment.requests:
        known = max((min(n, seen.get(name, 0)) for name, n in request.prefix), default=0)
        known = request.prompt_tokens if cache.prompts_cached else known
        found.append(request.prompt_tokens - min(known, request.prompt_tokens - 1))
        for name, tokens in request.prefix:
            seen[name] = max(seen.get(name, 0), tokens)
    return np.array(found, np.float64)


def _cost(deployment: Deployment) -> IterationCost:
    engine, cluster = deployment.scenario.engine, deployment.scenario.cluster
    return IterationCost(
        deployment.ops,
        deployment.ops.whole_layer if engine.layer_time == "measured" else SUM,
        deployment.scope if cluster.pp > 1 else None,
        engine.lm_head,
        host_of(engine),
    )


@lru_cache(maxsize=64)  # deployments with the same op times share their attention
def _decodes(ops: OpTimes, context: float) -> Floats:
    return ops.decode(BATCHES, context)


@lru_cache(maxsize=64)
def _prompts(ops: OpTimes, tokens: tuple[float, ...]) -> Floats:
    return ops.prefill(np.array(tokens), 0.0)  # in one piece


@lru_cache(maxsize=64)
def _least(ops: OpTimes, tokens: tuple[float, ...]) -> Floats:
    """Of each prompt in a batch that may hold many."""
    return ops.together.least_s(np.array(tokens), _prompts(ops, tokens))


def most_requests_per_s(option: Option, objectives: Sequence[Objective] = ()) -> float:
    """Requests a second that one replica cannot exceed while it keeps the objectives; of two pools,
    what all workers of the first to saturate cannot exceed, or the links of the prefill workers."""
    each, whole = _bounds(option), option.deployment
    if not isinstance(whole, PoolsDeployment):
        return each[0].under_all(objectives)
    rates = [each[0].requests_per_s(), saturation(as_decode(each[1].deployment), objectives)]
    cache = whole.decode.scenario.kv_cache
    if cache is None or not cache.prefix_caching:
        rates[0] = min(
            rates[0],
            sent_per_s(
                whole.prefill,
                whole.handover,
                whole.requests,
            ),
        )
    return min(
        pool.deployment.scenario.cluster.replicas * rate
        for pool, rate in zip(each, rates, strict=True)
    )


@lru_cache(maxsize=2)
def _bounds(option: Option) -> list[Bounds]:
    """Of the pools of a deployment, with the requests that it serves as a whole."""
    refused, pools = option.deployment.refused[0], option.deployment.pools
    return [
        Bounds(
            replace(pool, requests=[one for one in pool.requests if one.id not in refused])
            if refused - pool.refused[0]
            else pool
        )
        for pool in pools
    ]


def saturation(deployment: Deployment, objectives: Sequence[Objective] = ()) -> float:
    """Requests a second that a replica of a pool cannot exceed while it keeps the objectives."""
    return Bounds(deployment).under_all(objectives)


def sent_per_s(prefill: Deployment, over: Handover, requests: Sequence[Request]) -> float:
    """Requests a second whose KV the links of one prefill worker can send, a link a rank; those
    with one output token are not sent."""
    sent = [one.prompt_tokens for one in requests if one.output_tokens > 1]
    took_s = sum(over.setup_s + over.token_s * tokens for tokens in sent)
    return prefill.scenario.cluster.dp * len(requests) / max(took_s, 1e-12)


def as_prefill(deployment: Deployment) -> Deployment:
    """A replica as a prefill worker: requests end with their first token."""
    return replace(deployment, requests=[prompt_of(each) for each in deployment.requests])


def as_decode(deployment: Deployment) -> Deployment:
    """A replica as a decode worker: prompts are computed elsewhere, all or all but a token."""
    known = HANDOVERS[deployment.scenario.policy.name].token_known
    remote = [
        replace(one, remote_tokens=one.prompt_tokens - (not known or one.output_tokens == 1))
        for one in deployment.requests
    ]
    return replace(deployment, requests=remote)


def alone(option: Option, objectives: Sequence[Objective]) -> tuple[float, str]:
    """The least time of a request that is alone over its limit, where that is largest; and why no
    load can keep the SLO, empty if one may."""
    each = _bounds(option)
    prefill, decode = each[0], each[-1]
    worst = (0.0, "")
    for one in objectives:
        for metric, limit in one.limits.items():
            if metric == "ttft_s" and one.statistic not in ("", "mean"):
                tokens = float(np.quantile(prefill.new_tokens, one.kept_share))
                least_s = _prompt_s(prefill, tokens)
                what = f"a single prompt of {tokens:,.0f} tokens ({one.statistic})"
            elif metric in _TOKENS and one.statistic:
                least_s, what = decode.token_s, "each token of a single request"
            else:
                continue
            text = f"{what} takes at least {1e3 * least_s:.0f} ms, more than {one.text}"
            worst = max(worst, (least_s / limit, text * (least_s > limit * SLACK)))
    return worst


def _layer(cost: IterationCost, tokens: npt.ArrayLike) -> Floats:
    return np.asarray(sum(cost.layer_parts(tokens).values(), np.zeros(np.shape(tokens))))


def _prompt_s(bounds: Bounds, tokens: float) -> float:
    """Seconds of a prompt on all stages; its chunks overlap in the pipeline."""
    attention = bounds.cost.layer.scale * float(_prompts(bounds.deployment.ops, (tokens,))[0])
    chunk = int(min(tokens, bounds.chunk))
    passes, layers = tokens / max(chunk, 1), bounds.layers
    piped = sum(layers) + max(layers) * (max(passes, 1.0) - 1.0)
    return float(sum(layers) * attention + float(_layer(bounds.cost, chunk)) * piped)
