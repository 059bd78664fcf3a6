"""Bounds on what a deployment can do, from its op times alone: no simulation is needed.

Requests that are rejected take no time, and are left out: rates are of those that are served.
The throughput is bounded by the GPU time that a request takes at least: all its tokens at the best
rate that any batch allows, its prompt's attention in one piece, its decodes' attention in the
batch that suits them best. Prompt tokens that a prefix cache may hold cost nothing. A limit on the
time between tokens bounds that batch, and how often a chunk may come that alone takes longer.
Latencies are bounded by a request that is alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import compress

import numpy as np
import numpy.typing as npt

from sarathi_sim.experiments.capacity.options import Option
from sarathi_sim.experiments.capacity.slo import STATISTICS, Objective
from sarathi_sim.experiments.config.deployment import Deployment
from sarathi_sim.experiments.config.inputs import host_of
from sarathi_sim.policies.policy import chunking_of
from sarathi_sim.simulator.loop.records import Floats
from sarathi_sim.simulator.op_times.iteration import IterationCost
from sarathi_sim.simulator.op_times.op_times import SUM, OpTimes

SAMPLE = 64
SLACK = 1.02
"""The best rate is looked for on a grid."""
BATCHES = np.unique(np.geomspace(1, 4096, 80).astype(np.int64))
OFTEN = 2.0
"""How many times more slow chunks there may be than Poisson arrivals allow."""
_TAIL = {"p90": 0.9, "p99": 0.99}
_TOKENS = ("tpot_s", "tbt_s", "tbt_max_s")


class Bounds:
    """The bounds of one deployment. Deployments with the same op times share their attention."""

    def __init__(self, option: Option) -> None:
        self.deployment = deployment = option.deployment
        self.cost, self.layers = _cost(deployment), deployment.layers
        refused = deployment.refused[0]
        served = [one.id not in refused for one in deployment.requests]
        requests = list(compress(deployment.requests, served))
        each = slice(None, None, max(1, len(requests) // SAMPLE))
        sample = requests[each]
        self.new_tokens = new_tokens(deployment)[served]
        self.prompt = self.new_tokens[each]
        self.output = np.array([request.output_tokens for request in sample], np.float64)
        held = np.array([request.prompt_tokens for request in sample], np.float64)
        self.sequences = deployment.scenario.batching.max_batch or 1
        chunking = chunking_of(deployment.scenario.policy.build())
        longest = int(held.max())
        self.chunk = chunking.tokens if chunking else longest
        rows = (chunking.rows if chunking else longest) + self.sequences
        self.sizes = np.unique(np.geomspace(1, rows, 160).astype(np.int64))
        self.context = float((held + self.output / 2).mean())
        self.own_context = float((self.prompt + self.output / 2).mean())
        self.linear = _layer(self.cost, self.sizes)
        scale = self.cost.layer.scale
        self.decode = scale * _decodes(self.deployment.ops, self.context)

    @property
    def token_s(self) -> float:
        """A token of a request that is alone takes at least that long."""
        layers = sum(self.layers) * (self.linear[0] + self.decode[0])
        return float(layers + self._edges(np.ones(1))[0])

    def _edges(self, rows: Floats) -> Floats:
        """What an iteration takes beside its layers: the LM head, the host, the links."""
        links = (len(self.layers) - 1) * self.cost.transfer_s(rows)
        return np.asarray(self.cost.last_s(rows) + self.cost.host_s(rows) + links)

    def requests_per_s(self, most: float = np.inf) -> float:
        """A rate that one replica cannot exceed with at most ``most`` decodes in an iteration."""
        most = max(1, min(self.sequences, self.deployment.kv_capacity // self.own_context, most))
        tried = slice(0, int(np.searchsorted(BATCHES, most)) + 1)
        batches = BATCHES[tried]
        decode = float((self.decode[tried] / batches).min())
        head = float((self.cost.last_s(batches) / batches).min())
        per_row = float((self.linear / self.sizes).min())
        # No iteration has more decodes than sequences, nor takes less than that of one row.
        least = (self.output - 1) / most * self.linear[0]
        rows_s = np.maximum((self.prompt + self.output - 1) * per_row, least)
        alone_s = _prompts(self.deployment.ops, tuple(self.prompt))  # a batch may hold many
        prompts_s = self.cost.layer.scale * self.cost.ops.together.least_s(self.prompt, alone_s)
        of_layer = rows_s + prompts_s + (self.output - 1) * decode
        # Each stage must do its part of every request; the last one the LM head, too.
        last = self.layers[-1] * of_layer + self.output * head
        return SLACK / max(float((max(self.layers) * of_layer).mean()), float(last.mean()))

    def under(self, objective: Objective) -> float:
        """A rate that one replica cannot exceed while it keeps a clause of an SLO."""
        found = [np.inf]
        share = 1 - (objective.share or STATISTICS[objective.statistic])
        if objective.statistic == "mean":
            share = 0.0
        for metric, limit in objective.limits.items():
            if metric not in _TOKENS:
                continue
            # The other share of the tokens may come in batches of any size.
            found.append(self.requests_per_s(self._largest_batch(limit)) / (1 - share))
            if metric != "tpot_s" and share:
                found.append(self._slow_chunks(limit, share))
        return min(found)

    def _largest_batch(self, limit_s: float) -> int:
        """The most decodes that an iteration can do in that time."""
        rows = np.interp(BATCHES, self.sizes, self.linear)
        takes = sum(self.layers) * (rows + self.decode) + self._edges(BATCHES.astype(np.float64))
        return int(BATCHES[min(int((takes <= limit_s * SLACK).sum()), len(BATCHES) - 1)])

    def _slow_chunks(self, limit_s: float, share: float) -> float:
        """The rate at which iterations with a chunk that alone exceeds the limit hit that share
        of the tokens.

        A prompt that arrives finds as many decodes as there are on average (Poisson arrivals), so
        the share is the rate of such iterations times the mean time between tokens. Prompts that
        arrive during a full iteration share the next one.
        """
        takes = sum(self.layers) * self.linear + self._edges(np.ones(1))[0]
        slow = self.sizes[takes > limit_s * SLACK]
        if not len(slow) or slow[0] > self.chunk:
            return float("inf")
        whole, rest = np.divmod(self.prompt, self.chunk)
        chunks = float((whole + (rest >= slow[0])).mean())
        apart_s = self.token_s - share * float(takes[-1])
        return OFTEN * share / (chunks * apart_s) if chunks * apart_s > 0 else float("inf")


def new_tokens(deployment: Deployment) -> Floats:
    """Prompt tokens of each request that no prefix cache saves: those that no earlier one had."""
    cache, found, seen = deployment.scenario.kv_cache, [], dict[Hashable, int]()
    for request in deployment.requests:
        known = 0
        if cache is not None and cache.prefix_caching:
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


@lru_cache(maxsize=64)
def _decodes(ops: OpTimes, context: float) -> Floats:
    """Decode attention of :data:`BATCHES`."""
    return ops.decode(BATCHES, context)


@lru_cache(maxsize=64)
def _prompts(ops: OpTimes, tokens: tuple[float, ...]) -> Floats:
    """Attention of prompts in one piece."""
    return ops.prefill(np.array(tokens), 0.0)


def most_requests_per_s(option: Option, objectives: Sequence[Objective] = ()) -> float:
    """Requests a second that one replica cannot exceed while it keeps the objectives."""
    bounds = Bounds(option)
    return min([bounds.requests_per_s(), *map(bounds.under, objectives)])


def alone(option: Option, objectives: Sequence[Objective]) -> str:
    """Why no load at all can keep the SLO: a request that is alone breaks it. Empty if it may."""
    bounds = Bounds(option)
    for one in objectives:
        for metric, limit in one.limits.items():
            if metric == "ttft_s" and one.statistic in _TAIL:
                tokens = float(np.quantile(bounds.new_tokens, _TAIL[one.statistic]))
                least_s = _prompt_s(bounds, tokens)
                what = f"a prompt of {tokens:,.0f} tokens ({one.statistic}) alone"
            elif metric in _TOKENS and one.statistic:
                least_s, what = bounds.token_s, "a token of a request that is alone"
            else:
                continue
            if least_s > limit * SLACK:
                return f"{what} takes {1e3 * least_s:.0f} ms at least, more than {one.text}"
    return ""


def _layer(cost: IterationCost, tokens: npt.ArrayLike) -> Floats:
    return np.asarray(sum(cost.layer_parts(tokens).values(), np.zeros(np.shape(tokens))))


def _prompt_s(bounds: Bounds, tokens: float) -> float:
    """A prompt in the chunks that the budget allows, on all stages; those that go through a
    pipeline behind each other overlap."""
    attention = bounds.cost.layer.scale * float(_prompts(bounds.deployment.ops, (tokens,))[0])
    chunk = int(min(tokens, bounds.chunk))
    passes, layers = tokens / max(chunk, 1), bounds.layers
    piped = sum(layers) + max(layers) * (max(passes, 1.0) - 1.0)
    return float(sum(layers) * attention + float(_layer(bounds.cost, chunk)) * piped)
