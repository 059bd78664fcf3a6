"""The names of configuration keys on axes, in legends and in headings of tables."""

from __future__ import annotations

from dataclasses import dataclass

from sarathi_sim.simulator.views.metric_registry import number_text, with_unit


@dataclass(frozen=True)
class Parameter:
    """A key's name and unit; ``short`` is its label beside a point, as in ``TP 4``."""

    name: str
    unit: str = ""
    short: str = ""

    @property
    def axis(self) -> str:
        """The label of an axis: ``chunk size (tokens)``."""
        return with_unit(self.name, self.unit)

    @property
    def heading(self) -> str:
        """The heading of a column: ``chunk (tokens)``."""
        return with_unit(self.short or self.name, self.unit)

    def value(self, value: object) -> str:
        """Beside a point: ``TP 4``, ``chunk size 256``; of a text, it alone."""
        text = number_text(value) if isinstance(value, float) else str(value)
        return text if isinstance(value, str) else self.called(text)

    def called(self, text: str) -> str:
        """A value, as text, after the short name: ``P:D 50``."""
        return f"{self.short or self.name} {text}"


PARAMETERS = {
    "scenario": Parameter("scenario"),
    "seed": Parameter("seed"),
    "model": Parameter("model"),
    "device": Parameter("device"),
    "profiles": Parameter("profiles"),
    "stack": Parameter("serving stack"),
    "dtype": Parameter("number format"),
    "kv_cache_dtype": Parameter("number format of the KV cache"),
    "moe_dtype": Parameter("number format of the experts"),
    "expert_distribution": Parameter("spread of tokens over experts"),
    "workload": Parameter("workload"),
    "workload.lengths": Parameter("lengths"),
    "workload.lengths.kind": Parameter("lengths"),
    "workload.lengths.theta": Parameter("Zipf exponent"),
    "workload.lengths.min": Parameter("shortest request", "tokens"),
    "workload.lengths.max": Parameter("longest request", "tokens"),
    "workload.lengths.step": Parameter("step of the lengths", "tokens"),
    "workload.lengths.total": Parameter("length of a request", "tokens", "length"),
    "workload.lengths.prompt": Parameter("prompt", "tokens"),
    "workload.lengths.decode": Parameter("output", "tokens"),
    "workload.lengths.path": Parameter("trace"),
    "workload.lengths.columns": Parameter("columns of the trace"),
    "workload.lengths.columns.arrival": Parameter("column of arrivals"),
    "workload.lengths.columns.prompt": Parameter("column of prompt tokens"),
    "workload.lengths.columns.output": Parameter("column of output tokens"),
    "workload.lengths.columns.user": Parameter("column of users"),
    "workload.lengths.columns.session": Parameter("column of sessions"),
    "workload.lengths.columns.turn": Parameter("column of turns"),
    "workload.arrivals.rates.at_s": Parameter("time of an arrival rate", "s", "time"),
    "workload.arrivals.rates.rate": Parameter("arrival rate then", "requests/s", "rate"),
    "workload.lengths.time_unit": Parameter("unit of the trace's times"),
    "workload.lengths.skip_empty": Parameter("without empty requests"),
    "workload.lengths.sample": Parameter("share of the trace", "", "sample"),
    "workload.lengths.resample": Parameter("blocks of the trace", "requests", "blocks"),
    "workload.lengths.clip.prompt": Parameter("longest prompt", "tokens"),
    "workload.lengths.clip.output": Parameter("longest output", "tokens"),
    "workload.arrivals.rates": Parameter("arrival rates"),
    "workload.arrivals.repeat": Parameter("rates again"),
    "workload.arrivals.scale": Parameter("scale of the arrival rate", "", "scale"),
    "workload.arrivals": Parameter("arrivals"),
    "workload.arrivals.kind": Parameter("arrivals"),
    "workload.arrivals.rate": Parameter("arrival rate", "requests/s", "rate"),
    "workload.arrivals.clients": Parameter("clients"),
    "workload.arrivals.think_s": Parameter("think time", "s"),
    "workload.arrivals.cv": Parameter("variation of the gaps between arrivals", "", "variation"),
    "workload.requests": Parameter("requests"),
    "workload.pd_ratio": Parameter("prompt tokens for each output token (P:D)", "", "P:D"),
    "workload.pd_ratio.low": Parameter("least P:D", "", "P:D from"),
    "workload.pd_ratio.high": Parameter("most P:D", "", "P:D to"),
    "workload.too_long": Parameter("requests that are too long"),
    "workload.declared": Parameter("declared output"),
    "workload.lengths.tool": Parameter("load generator that lengths are drawn like"),
    "workload.lengths.range_ratio": Parameter("spread of lengths", "", "range"),
    "workload.system_prompts": Parameter("system prompts"),
    "workload.system_prompts.share": Parameter("share with a system prompt", "", "share"),
    "workload.system_prompts.tokens": Parameter("system prompt", "tokens"),
    "workload.sessions": Parameter("sessions"),
    "workload.sessions.min_turns": Parameter("fewest turns of a session", "", "turns from"),
    "workload.sessions.max_turns": Parameter("most turns of a session", "", "turns to"),
    "workload.sessions.think_s": Parameter("think time between turns", "s", "think time"),
    "workload.every": Parameter("every n-th request", "", "every"),
    "workload.shift": Parameter("shift of the workload"),
    "workload.shift.prompt": Parameter("prompts so many times as long", "", "prompts x"),
    "workload.shift.output": Parameter("outputs so many times as long", "", "outputs x"),
    "workload.shift.burstiness": Parameter("burstiness so many times", "", "burstiness x"),
    "cluster": Parameter("cluster"),
    "cluster.tp": Parameter("tensor-parallel degree", "", "TP"),
    "cluster.pp": Parameter("pipeline stages", "", "PP"),
    "cluster.replicas": Parameter("replicas"),
    "cluster.router": Parameter("router"),
    "cluster.layers_per_stage": Parameter("layers of each stage"),
    "cluster.usable_memory": Parameter("usable share of the memory"),
    "cluster.max_length": Parameter("longest sequence", "tokens"),
    "cluster.gpus_per_node": Parameter("GPUs of a node"),
    "cluster.expert_parallel": Parameter("expert parallel"),
    "cluster.moe_a2a_backend": Parameter("all-to-all of the experts"),
    "cluster.dp": Parameter("data-parallel degree of attention", "", "DP"),
    "policy": Parameter("policy"),
    "policy.name": Parameter("policy"),
    "policy.chunk_size": Parameter("chunk size", "tokens", "chunk"),
    "policy.tile": Parameter("tile", "tokens"),
    "batching": Parameter("batching"),
    "batching.max_batch": Parameter("largest batch", "sequences", "batch"),
    "batching.max_in_flight": Parameter("micro-batches in flight"),
    "batching.formation": Parameter("batch formation"),
    "batching.micro_batches": Parameter("micro-batches"),
    "batching.kv_reservation": Parameter("KV reservation"),
    "kv_cache": Parameter("KV cache"),
    "kv_cache.block_size": Parameter("KV block size", "tokens", "block"),
    "kv_cache.num_blocks": Parameter("KV blocks"),
    "kv_cache.gpu_memory_utilization": Parameter("share of the GPU memory"),
    "kv_cache.mem_fraction_static": Parameter("static share of the GPU memory"),
    "kv_cache.free_gpu_memory_fraction": Parameter("share of the free GPU memory"),
    "kv_cache.activation_bytes": Parameter("peak of activations", "bytes"),
    "kv_cache.non_torch_bytes": Parameter("memory outside of torch", "bytes"),
    "kv_cache.cuda_graph_bytes": Parameter("memory of CUDA graphs", "bytes"),
    "kv_cache.prefix_caching": Parameter("prefix caching"),
    "kv_cache.prompts_cached": Parameter("prompts cached before"),
    "engine": Parameter("engine"),
    "engine.turnaround_s": Parameter("scheduler turn-around", "s", "turn-around"),
    "engine.jitter": Parameter("jitter (coefficient of variation)", "", "jitter"),
    "engine.send": Parameter("sends"),
    "engine.lm_head": Parameter("LM head"),
    "engine.layer_time": Parameter("layer time"),
    "engine.host_iteration_s": Parameter("host time of an iteration", "s", "host"),
    "engine.op_scale": Parameter("factors on op times"),
    "engine.host_sequence_s": Parameter("host time of a sequence", "s", "host a sequence"),
    "engine.frontend_s": Parameter("frontend time of a request", "s", "frontend"),
    "engine.launch_layer_s": Parameter("time to launch a layer's kernels", "s", "launch"),
}
"""By key path. What is missing, such as a policy's own keys, is called by the key's words."""


def parameter(path: str) -> Parameter:
    """The name of a key, its unit, and its short name."""
    return PARAMETERS.get(path) or Parameter(path.rpartition(".")[2].replace("_", " "))


def value_name(value: object) -> str:
    """A swept value in a legend; of a policy's keys the words."""
    if isinstance(value, float):
        return f"{value:g}"
    name, space, keys = str(value).partition(" ")
    return name + space + keys.replace("_", " ")
