"""Features that are not modelled, by their names in serving engines, and what to do instead.

Every door that refuses an unknown name asks :func:`not_modelled` first (``strict.py``).
docs/model/limits.md is made from :data:`LIMITS` by ``experiments/lab/pages.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

PAGE = "docs/model/limits.md"


@dataclass(frozen=True)
class Limit:
    """Something that is not modelled: ``what``, and what to do ``instead``. ``names`` are patterns
    (``*`` is anything) of the keys, values, models, GPUs and formats that ask for it: in small
    letters, words joined by ``-``, a model without its owner."""

    what: str
    instead: str
    names: str

    def asked_by(self, name: str) -> bool:
        """Whether a plain name (:func:`_plain`) asks for it."""
        return _matches(name, self.names)


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


KEYS = {
    "`speculation.model`": (
        "draft-model *-draft-model *-draft-model-path speculative-model *-draft-model-name"
    ),
    "`speculation`": (
        "speculat* *-speculative-* spec spec-* draft* *-draft-* mtp mtp-* *-mtp-* eagle* ngram* "
        "num-nextn*"
    ),
    "`disaggregation`": (
        "disagg* *-disagg* pd-disagg* prefill-decode* kv-transfer* kv-connector* prefill-replicas "
        "decode-replicas prefill-pool decode-pool prefill-workers decode-workers "
        "prefill-instances decode-instances prefill-tp decode-tp"
    ),
    "`cluster.dp`": (
        "dp-attention *-dp-attention attention-dp *-attention-dp data-parallel* dp-size enable-dp* "
        "adp"
    ),
    "`cluster.redundant_experts`": "*redundant-experts*",
    "`policy.enable_balance`": "attention-dp-config enable-balance adp-balanc*",
    "`policy: {file: vllm_v0.py, name: vllm_v0}`, a file in `experiments/configs`": "vllm-v0",
}
"""By the key of a configuration, the names that engines give to what it is."""

_PROFILE = "profile it: give `profiles` op times measured on it, `device` a YAML of its data sheet"
_DENSE = "give a `config.json` of a type that docs/reference/models.md lists"

Kind = Literal["feature", "model", "device", "format"]
#: A feature that becomes modelled loses its line.
LIMITS: dict[Kind, tuple[Limit, ...]] = {
    "feature": (
        Limit(
            "drafters other than MTP, EAGLE-3, draft models and n-grams; trees of drafts",
            "give `speculation` the nearest `method`, its `draft_length`, and as `acceptance` the "
            "mean tokens of a decode that you measured",
            "medusa* dspark* dflash* lookahead* *-eagle-topk suffix eagle eagle2",
        ),
        Limit(
            "LoRA adapters",
            "simulate the base model: a merged adapter costs nothing more; for separate "
            "adapters add their memory to `kv_cache.non_torch_bytes`",
            "lora* *-lora* qlora* adapter adapters *-adapters",
        ),
        Limit(
            "offload of KV cache or weights to the host or a disk",
            "for the best case without transfers, give `device` a copy of its file in "
            "data/devices, with `memory_bytes` and `reported_bytes` of GPU and host together",
            "*offload* hicache* enable-hierarchical-cache swap-space lmcache* *host-cache* "
            "cpu-cache* disk-cache*",
        ),
        Limit(
            "kernel backends, sizes of CUDA graphs, stream intervals and front-end processes",
            "the kernels are those of the published tables (`sarathi-sim list support`), CUDA "
            "graphs hold up to 512 tokens, and each token is sent at once; `engine` has vLLM's "
            "`cudagraph_mode`, `splitting_ops` and `fi_allreduce_fusion_max_size_mb`",
            "attention-backend moe-backend moe-runner-backend *gemm-backend *allreduce-backend "
            "*cudagraph-capture-size* *cuda-graph-max-bs* cuda-graph-sizes cuda-graph-config "
            "custom-ops fuse-attn-quant enable-attn-fusion enable-symm-mem "
            "enable-flashinfer-allreduce-fusion *stream-interval tokenizer-worker-num "
            "num-postprocess-workers",
        ),
        Limit(
            "autoscaling",
            "find the number of servers for each load of the day: `sarathi-sim recommend --rate`, "
            "or `cluster.replicas` in the space of a `capacity` section",
            "autoscal* auto-scal* *-autoscal* min-replicas max-replicas min-workers "
            "max-workers hpa keda scale-to-zero cold-start*",
        ),
        Limit(
            "context parallelism",
            "all tokens of a sequence are in one tensor-parallel group: increase `cluster.tp` or "
            "`cluster.pp`",
            "cp cp-size dcp dcp-* pcp context-parallel* *-context-parallel* sequence-parallel* "
            "ring-attention helix*",
        ),
        Limit(
            "moving experts during a run (EPLB), overlap of two half batches",
            "`cluster.redundant_experts` adds copies of experts, placed so that the load is even; "
            "the overlap is left out",
            "*eplb* expert-placement* dbo *-dbo tbo *two-batch-overlap*",
        ),
        Limit(
            "prefix-cache hit rates as an input",
            "a hit rate is a result: state what prompts share in `workload.system_prompts` and "
            "`workload.sessions` (docs/research/workloads.md), or give a trace with sessions",
            "*hit-rate* *hit-ratio* *cached-ratio* *cached-share* *cached-fraction* "
            "*prefix-share* *prefix-ratio*",
        ),
        Limit(
            "replicas that differ",
            "simulate each kind apart with its share of the load, and add the results",
            "heterogeneous* replica-groups device-types node-types gpu-types *-per-replica",
        ),
        Limit(
            "KV-aware and cache-aware routing",
            "`cluster.router` is round_robin, random, least_tokens, least_requests, "
            "least_prompt_tokens or power_of_two, and none follows sessions; for the best case "
            "simulate one replica with the sessions that it would get",
            "kv-aware* *-kv-aware cache-aware* prefix-aware* prefix-cache-aware* session-aware* "
            "*affinity* sticky* kv-router* kv-routing",
        ),
        Limit(
            "engines other than vLLM, SGLang and TensorRT-LLM (TGI, LMDeploy, llama.cpp, Dynamo)",
            "take the `stack` and `policy` of the nearest: vllm, sglang or trtllm",
            "tgi text-generation-inference lmdeploy llama.cpp llama-cpp llamacpp ollama mlc* "
            "deepspeed* mii dynamo llm-d",
        ),
        Limit(
            "parallel sampling, beam search, guided decoding",
            "a request has one output: write `n` outputs as `n` requests with a shared prompt "
            "(`workload.system_prompts`); choosing a token takes no time",
            "best-of beam* *-beam-* num-beams guided* *structured-output* grammar* "
            "json-schema *constrained*",
        ),
    ),
    "model": (
        Limit(
            "models that read images or sound",
            "the text part of gemma3, mistral3, llama4, kimi_k25 and qwen3_5 is read from their "
            "`config.json`; for others give a `config.json` of the text model alone",
            "*-vl *-vl-* *-vl[23]* *-vision* *llava* pixtral* *internvl* *-omni* *minicpm-[vo]* "
            "paligemma* idefics* molmo* fuyu* *-audio* whisper* *-multimodal* mllama* "
            "llama-3.2-11b* llama-3.2-90b* *glm-4v* *glm-4.5v* cogvlm* *-ocr* *smolvlm* "
            "phi3-v*",
        ),
        Limit(
            "linear attention other than gated delta nets (MiniMax M1, Kimi Linear, RWKV, RetNet)",
            f"no kernels of it were measured; {_DENSE}",
            "*minimax-m1* *minimax-text-01* *kimi-linear* *rwkv* *retnet*",
        ),
        Limit(
            "models with state-space layers (Mamba, Jamba, Zamba, Falcon-H1, Granite 4 H, "
            "Nemotron-H) other than Nemotron 3 Nano",
            f"only the layers of nemotron-3-nano are read; {_DENSE}",
            "*mamba* *jamba* *zamba* *bamba* *nemotron-h-* granite-4.0-h* granitemoehybrid "
            "falcon-h1* *hymba*",
        ),
        Limit(
            "experts on a vector smaller than the hidden state (Nemotron 3 Super and Ultra)",
            f"{_DENSE}",
            "*nemotron-3-super* *nemotron-3-ultra*",
        ),
        Limit(
            "sparse attention whose layers share an indexer (GLM-5.2), or of compressed tokens "
            "(DeepSeek V4)",
            "glm-5 and deepseek-v3.2 have an indexer in every layer",
            "*glm-5.2* *glm-5.3* *deepseek-v4*",
        ),
        Limit(
            "Gemma 3n: its layers share keys and values, and have extra networks for each token",
            f"{_DENSE}",
            "gemma-3n* gemma3n*",
        ),
        Limit(
            "Gemma 1: its parameter count was not checked against a published one",
            "take gemma-2-9b",
            "gemma gemma-2b* gemma-7b*",
        ),
        Limit(
            "Granite mixtures of experts: their parameter count was not checked against a "
            "published one",
            f"{_DENSE}",
            "granitemoe granitemoeshared granite-3.?-1b-a400m* granite-3.?-3b-a800m*",
        ),
        Limit(
            "Command R and R+: attention and FFN of a layer run side by side after one norm",
            f"only layers with one after the other are modelled; {_DENSE}",
            "cohere cohere2 *command-r* *command-a*",
        ),
        Limit(
            "OLMo 2 and 3: norms come after attention and FFN, and those of queries and keys span "
            "all heads",
            f"{_DENSE}",
            "olmo2 olmo3 olmo-2* olmo-3*",
        ),
        Limit(
            "models without a text decoder (encoders, embeddings, diffusion)",
            f"only decoders are modelled; {_DENSE}",
            "bert* *-bert-* roberta* t5* flan-t5* bart* bge-* e5-* gte-* *-embedding* "
            "*-reranker* stable-diffusion* flux*",
        ),
    ),
    "device": (
        Limit(
            "AMD GPUs (MI300X and others)",
            _PROFILE,
            "mi[1-4][0-9][0-9]* *-mi[1-4][0-9][0-9]* amd amd-* *instinct* *radeon* rocm* gfx9*",
        ),
        Limit("Google TPU", _PROFILE, "tpu* *-tpu* v5e* v5p* v6e* trillium* ironwood*"),
        Limit("Intel Gaudi", _PROFILE, "gaudi* *-gaudi* hpu* habana*"),
        Limit(
            "AWS Trainium and Inferentia, Intel GPUs, Ascend, Apple, Groq, Cerebras",
            _PROFILE,
            "trn[12]* trainium* inf[12]* inferentia* neuron* ponte-vecchio* intel-* ascend* "
            "910b* apple* mps groq* cerebras*",
        ),
        Limit(
            "the 72 GPUs of a GB200 or GB300 NVL72 as one node",
            "`gb200` is one tray of four GPUs: TP up to 4, pipeline stages and replicas across the "
            "rack",
            "gb200-nvl* gb200nvl* gb300-nvl* gb300nvl* nvl72* *-nvl72",
        ),
        Limit(
            "H100 PCIe, H100 NVL, A100 PCIe",
            "power, clocks and memory differ from the SXM cards' (`h100-80g-sxm`, "
            f"`a100-80g-sxm`): {_PROFILE}",
            "*h100*pcie* *h100*nvl* *a100*pcie* *h200*nvl*",
        ),
        Limit(
            "other NVIDIA GPUs (V100, T4, L4, A10, H20, GH200, RTX 3090, 5090, DGX Spark, Jetson)",
            f"no kernels were measured on them: {_PROFILE}",
            "v100* *-v100* t4 t4-* tesla-* *-t4 l4 l4-* *-l4 a10 a10-* a10g* *-a10 *-a10g h20 "
            "h20-* *-h20 h800* a800* gh200* rtx-3090* rtx3090* *-3090* rtx-5090* rtx5090* *-5090* "
            "p100* gb10* dgx-spark* jetson* l40 l40-* "
            "a30 a30-* gb300 *-ada",
        ),
    ),
    "format": (
        Limit(
            "awq, gptq and w4a16 as names of formats",
            "write `dtype: int4_wo`, the format of their checkpoints (4 bits, groups of 128)",
            "awq* *-awq gptq* *-gptq marlin* w4a16 int4 4bit 4-bit auto-round autoround",
        ),
        Limit(
            "mxfp4 of all weights",
            "only a mixture's experts can have it: `moe_dtype: w4a16_mxfp4` (or w4a8_mxfp4_mxfp8)",
            "mxfp4* mxfp8 mxfp6* fp6*",
        ),
        Limit(
            "fp4 and modelopt_fp4 as names of a format",
            "write `dtype: nvfp4`",
            "fp4 modelopt-fp4 *-nvfp4",
        ),
        Limit(
            "fp16 and fp32",
            "write `dtype: bf16`, with the bytes and kernel speed of fp16; nothing replaces fp32",
            "fp16 float16 half float fp32 float32",
        ),
        Limit(
            "integer activations, GGUF, bitsandbytes and other formats",
            "take the nearest by its bytes: `fp8` for 8 bits, `int4_wo` for 4-bit weights alone",
            "int8* w8a8* w8a16* w4a8 *smoothquant* bitsandbytes* bnb* gguf* q[2-8]-* "
            "exl[23]* hqq* aqlm* quip* quark* torchao* fp8-e5m2 int4-kv int8-kv qoq* squeezellm* "
            "nf4 deepspeedfp",
        ),
    ),
}


def called_here(name: str) -> str:
    """The key by which a configuration asks for what an engine calls so; empty if it has no
    other."""
    plain = _plain(name)
    return next((key for key, called in KEYS.items() if _matches(plain, called)), "")


def not_modelled(name: str, *kinds: Kind) -> str:
    """``not modelled: what; what to do`` where a name asks for one of :data:`LIMITS`, else empty.
    ``kinds`` are the possible kinds of the name (none: a feature or a format)."""
    plain = _plain(name)
    for kind in kinds or ("feature", "format"):
        for limit in LIMITS[kind]:
            if limit.asked_by(plain):
                return f"not modelled: {limit.what}; {limit.instead} ({PAGE})"
    return ""


def _plain(name: str) -> str:
    """Small letters, no owner, words joined by ``-``."""
    return re.sub(
        r"[\s_]+",
        "-",
        name.rpartition("/")[2].lower(),
    )[:200]
