"""``config.json`` files as Hugging Face has them: those that are modelled, and those refused."""

from __future__ import annotations

from typing import Any

from sarathi_sim.profiler.facts.model import LARGEST

Config = dict[str, Any]

# What files have beside what says their cost, whatever its values.
FREE = """
    _name_or_path attention_dropout attn_dropout_prob attn_pdrop auto_map bf16 bos_token_id
    embd_pdrop eos_token_id fp16 initializer_range layer_norm_epsilon n_ctx onnx_safe
    original_max_position_embeddings pretraining_tp resid_pdrop rms_norm_eps rope_scaling rope_theta
    rotary_dim rotary_emb_base rotary_pct scale_attn_weights summary_type summary_use_proj
    task_specific_params transformers_version use_cache use_dynamic_ntk use_flash_attn
    use_logn_attn use_mrope
    """
FREE_OF_MIXTURES = """
    aux_loss_alpha ep_size mtp_transformer_layers n_group norm_topk_prob num_mtp_modules
    output_router_logits routed_scaling_factor router_aux_loss_coef router_jitter_noise scoring_func
    seq_aux topk_group topk_method use_mtp use_routing_bias
    """


def _free(names: str) -> Config:
    return dict.fromkeys(names.split(), 0.5)


def _model(
    base: Config, kind: str = "", sizes: tuple[int, ...] = (), free: str = "", **changes: Any
) -> Config:
    """A base with other keys. ``sizes`` are layers, hidden size, heads, KV heads, FFN, vocabulary;
    the ``free`` keys cost nothing in this type of model."""
    names = "num_hidden_layers hidden_size num_attention_heads num_key_value_heads"
    named = dict(zip([*names.split(), "intermediate_size", "vocab_size"], sizes, strict=False))
    return {**base, **({"model_type": kind} if kind else {}), **named, **_free(free), **changes}


def _packed(weights: Config, inputs: Config | None = None, **others: object) -> Config:
    group = {"weights": weights, "targets": ["Linear"], "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **others}


BASE: Config = {
    **_free(FREE),
    "architectures": ["SomeForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_2 = _model(
    BASE, "llama", (32, 4096, 32, 32, 11008, 32000), mlp_bias=False, max_position_embeddings=4096
)
LLAMA_3 = _model(
    LLAMA_2, "", (32, 4096, 32, 8, 14336, 128256), head_dim=128, max_position_embeddings=131072
)
LLAMA_3_2_1B = _model(
    LLAMA_3, "", (16, 2048, 32, 8, 8192, 128256), head_dim=64, tie_word_embeddings=True
)
_WINDOW: Config = {"max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": False}
QWEN_2 = _model({**BASE, **_WINDOW}, "qwen2", (28, 3584, 28, 4, 18944, 152064))
QWEN_2_5_SMALL = _model(
    {**QWEN_2, "layer_types": ["full_attention"] * 24, "sliding_window": None},
    *("", (24, 896, 14, 2, 4864, 151936)),
    tie_word_embeddings=True,
)
QWEN_3 = _model(
    {**QWEN_2, "max_window_layers": 36, "sliding_window": None},
    *("qwen3", (36, 4096, 32, 8, 12288, 151936)),
    head_dim=128,
    max_position_embeddings=40960,
)
QWEN_3_SMALL = _model(QWEN_3, "", (28, 1024, 16, 8, 3072, 151936), tie_word_embeddings=True)
MISTRAL_3 = _model(BASE, "mistral", (32, 4096, 32, 8, 14336, 32768), sliding_window=None)
MISTRAL_1 = _model(MISTRAL_3, vocab_size=32000, sliding_window=4096)
# Its window is never reached.
PHI_3_128K = _model(BASE, "phi3", (32, 3072, 32, 32, 8192, 32064), sliding_window=262144)
PHI_3_4K = _model(PHI_3_128K, max_position_embeddings=4096, sliding_window=2047)
PHI_4 = _model(
    *(PHI_3_128K, "", (40, 5120, 40, 10, 17920, 100352)),
    max_position_embeddings=16384,
    sliding_window=None,
)
_QWEN_1 = _model({**_free(FREE), "fp32": False}, "qwen", (80, 8192, 64, 64, 49152, 152064))
QWEN_1 = _model(_QWEN_1, kv_channels=128, no_bias=True, seq_length=32768, tie_word_embeddings=False)
del QWEN_1["num_key_value_heads"]
GPT_2: Config = {
    **_free(FREE),
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
GEMMA_2_9B = _model(
    _free(FREE),
    "gemma2",
    (42, 3584, 16, 8, 14336, 256000),
    "attn_logit_softcapping cache_implementation final_logit_softcapping query_pre_attn_scalar"
    " sliding_window_size",
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=8192,
    sliding_window=4096,
)
# What it leaves out are the type's defaults: 8 and 4 heads of 256, a vocabulary of 262,208.
GEMMA_3_4B: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
MIXTRAL_8X7B = _model(
    *(MISTRAL_1, "mixtral", (), FREE_OF_MIXTURES),
    max_position_embeddings=32768,
    sliding_window=None,
    num_experts_per_tok=2,
    num_local_experts=8,
)
QWEN_3_30B = _model(
    {**QWEN_3, "decoder_sparse_step": 1, "mlp_only_layers": []},
    *("qwen3_moe", (48, 2048, 32, 4, 6144, 151936), FREE_OF_MIXTURES),
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
)
QWEN_3_CODER = _model(
    {**QWEN_3_30B, "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    *("", (62, 6144, 96, 8, 8192, 151936)),
    max_position_embeddings=262144,
    moe_intermediate_size=2560,
    num_experts=160,
)
QWEN_15_MOE = _model(
    {**QWEN_2, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 5632},
    *("qwen2_moe", (24, 2048, 16, 16, 5632, 151936), FREE_OF_MIXTURES),
    moe_intermediate_size=1408,
    num_experts=60,
    num_experts_per_tok=4,
    qkv_bias=True,
)
GPT_OSS_20B = _model(
    {**BASE, "layer_types": ["sliding_attention", "full_attention"] * 12},
    *("gpt_oss", (24, 2880, 64, 8, 2880, 201088), FREE_OF_MIXTURES),
    attention_bias=True,
    head_dim=64,
    num_experts_per_tok=4,
    num_local_experts=32,
    quantization_config={
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    sliding_window=128,
    **_free("experts_per_token initial_context_length swiglu_limit"),
)
FP8_BLOCKS: Config = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_LATENT: Config = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V3 = _model(
    {**BASE, **_LATENT, "moe_layer_freq": 1, "num_nextn_predict_layers": 1},
    *("deepseek_v3", (61, 7168, 128, 128, 18432, 129280), FREE_OF_MIXTURES),
    first_k_dense_replace=3,
    max_position_embeddings=163840,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    quantization_config=FP8_BLOCKS,
)
# 27 layers, the first of them dense, no low rank of queries.
DEEPSEEK_V2_LITE = _model(
    {**DEEPSEEK_V3, "num_nextn_predict_layers": None, "quantization_config": None},
    *("deepseek_v2", (27, 2048, 16, 16, 10944, 102400)),
    first_k_dense_replace=1,
    moe_intermediate_size=1408,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    q_lora_rank=None,
)
LLAMA_4_SCOUT: Config = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "model_type": "llama4",
    "text_config": _model(
        {**BASE, "attention_chunk_size": 8192, "no_rope_layers": []},
        *("llama4_text", (48, 5120, 40, 8, 8192, 202048), FREE_OF_MIXTURES),
        head_dim=128,
        interleave_moe_layer_step=1,
        intermediate_size_mlp=16384,
        max_position_embeddings=10485760,
        num_experts_per_tok=1,
        num_local_experts=16,
        use_qk_norm=True,
        **_free("attn_scale attn_temperature_tuning floor_scale for_llm_compressor"),
    ),
    "vision_config": {"model_type": "llama4_vision_model"},
}
LLAMA_4_MAVERICK: Config = {
    **LLAMA_4_SCOUT,
    "text_config": {
        **LLAMA_4_SCOUT["text_config"],
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
        "num_local_experts": 128,
        "use_qk_norm": False,
    },
}
_FP8: Config = {"type": "float", "num_bits": 8, "strategy": "channel"}
_NVFP4: Config = {"type": "float", "num_bits": 4, "group_size": 16}
_INT4: Config = {"type": "int", "num_bits": 4, "group_size": 128}
# All but the routed experts is left out.
INT4_EXPERTS = _packed(
    {**_INT4, "group_size": 32},
    format="pack-quantized",
    ignore=[
        *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    kv_cache_scheme=None,
)
KIMI_K2_5: Config = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25",
    "text_config": _model(
        {**DEEPSEEK_V3, "bad_words_ids": None, "moe_layer_freq": 1, "num_nextn_predict_layers": 0},
        *("kimi_k2", (61, 7168, 64, 64, 18432, 163840), "forced_bos_token_id top_k"),
        first_k_dense_replace=1,
        max_position_embeddings=262144,
        n_routed_experts=384,
        quantization_config=INT4_EXPERTS,
    ),
    "vision_config": {"vt_num_hidden_layers": 27},
}
_INDEXED: Config = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
DEEPSEEK_V3_2 = _model({**DEEPSEEK_V3, **_INDEXED}, "deepseek_v32")
GLM_5 = _model(
    {**DEEPSEEK_V3_2, "quantization_config": None, "head_dim": 64, "index_n_heads": 32},
    *("glm_moe_dsa", (78, 6144, 64, 64, 12288, 154880)),
    max_position_embeddings=202752,
    q_lora_rank=2048,
    qk_nope_head_dim=192,
    v_head_dim=256,
    **_free("indexer_rope_interleave qk_head_dim rope_interleave rope_parameters"),
)
_DELTA: Config = {
    **BASE,
    **_free("partial_rotary_factor"),
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
}
QWEN_3_NEXT = _model(
    {**_DELTA, "decoder_sparse_step": 1, "moe_intermediate_size": 512, "num_experts": 512},
    *("qwen3_next", (48, 2048, 16, 2, 5120, 151936), FREE_OF_MIXTURES),
    num_experts_per_tok=10,
    shared_expert_intermediate_size=512,
)


def _qwen_3_5(kind: str, text: Config, layers: int) -> Config:
    full = {"layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4)}
    free = "mtp_num_hidden_layers mtp_use_dedicated_embeddings rope_parameters"
    gated = {"attn_output_gate": True, "mamba_ssm_dtype": "float32"}
    text = {key: value for key, value in text.items() if key != "architectures"}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": kind,
        "text_config": {**text, **full, **gated, **_free(free), "model_type": f"{kind}_text"},
        "tie_word_embeddings": False,
        "vision_config": {"depth": 27},
    }


_MIXED = _model(
    {**QWEN_3_NEXT, "linear_num_value_heads": 64, "shared_expert_intermediate_size": 1024},
    *("", (60, 4096, 32, 2, 5120, 248320)),
    moe_intermediate_size=1024,
)
del _MIXED["intermediate_size"]
QWEN_3_5 = _qwen_3_5("qwen3_5_moe", _MIXED, 60)
_DENSE = _model(_DELTA, "", (64, 5120, 24, 4, 17408, 248320), "output_gate_type")
QWEN_3_5_DENSE = _qwen_3_5("qwen3_5", {**_DENSE, "linear_num_value_heads": 48}, 64)
NEMOTRON_3_NANO = _model(
    {**BASE, **_free("chunk_size expand mamba_hidden_act mlp_hidden_act norm_eps time_step_min")},
    *("nemotron_h", (52, 2688, 32, 2, 1856, 131072), FREE_OF_MIXTURES),
    conv_kernel=4,
    head_dim=128,
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    mamba_head_dim=64,
    mamba_num_heads=64,
    mamba_proj_bias=False,
    mamba_ssm_cache_dtype="float32",
    max_position_embeddings=262144,
    mlp_bias=False,
    moe_intermediate_size=1856,
    moe_shared_expert_intermediate_size=3712,
    n_groups=8,
    n_routed_experts=128,
    n_shared_experts=1,
    num_experts_per_tok=6,
    sliding_window=None,
    ssm_state_size=128,
    use_bias=False,
    use_conv_bias=True,
)
MINIMAX_M2 = _model(
    {**BASE, "attn_type_list": [1] * 62, "shared_intermediate_size": 0, "use_qk_norm": True},
    *("minimax_m2", (62, 3072, 48, 8, 1536, 200064), FREE_OF_MIXTURES),
    head_dim=128,
    max_position_embeddings=196608,
    num_experts_per_tok=8,
    num_local_experts=256,
    quantization_config={
        **FP8_BLOCKS,
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    **_free("layernorm_full_attention_beta mlp_intermediate_size qk_norm_type shared_moe_mode"),
)

#: Of these a model ships with the same fields (whose totals are in test_model.py).
SHIPPED = {
    "llama-2-7b": LLAMA_2, "llama-3.1-8b": LLAMA_3, "llama-3.2-1b": LLAMA_3_2_1B, "phi-4": PHI_4,
    "qwen3-8b": QWEN_3, "qwen3-0.6b": QWEN_3_SMALL, "gemma-2-9b": GEMMA_2_9B, "qwen-72b": QWEN_1,
    "mixtral-8x7b": MIXTRAL_8X7B, "qwen3-30b-a3b": QWEN_3_30B, "gpt-oss-20b": GPT_OSS_20B,
    "qwen3-coder-480b-a35b": QWEN_3_CODER, "deepseek-v3": DEEPSEEK_V3, "kimi-k2.5": KIMI_K2_5,
    "llama-4-maverick": LLAMA_4_MAVERICK, "minimax-m2": MINIMAX_M2, "qwen3.5-397b-a17b": QWEN_3_5,
    "qwen3-next-80b-a3b": QWEN_3_NEXT, "glm-5": GLM_5, "deepseek-v3.2": DEEPSEEK_V3_2,
    "nemotron-3-nano": NEMOTRON_3_NANO,
}  # fmt: skip
#: Totals of the model cards' safetensors; of those with images what is left without their encoder.
MODELLED = {
    "qwen2-7b": (QWEN_2, 7_615_616_512),
    "qwen2.5-0.5b": (QWEN_2_5_SMALL, 494_032_768),
    "mistral-7b-v0.3": (MISTRAL_3, 7_248_023_552),
    "mistral-7b-v0.1": (MISTRAL_1, 7_241_732_096),
    "phi-3-mini-128k": (PHI_3_128K, 3_821_079_552),
    "phi-3-mini-4k": (PHI_3_4K, 3_821_079_552),
    "gemma-3-4b": (GEMMA_3_4B, 3_880_263_168),
    "qwen1.5-moe-a2.7b": (QWEN_15_MOE, 14_315_784_192),
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 15_706_484_224),
    "gpt2": (GPT_2, 124_439_808),
    # Its sizes: 48 gated delta nets, 16 layers with attention, 64 networks, two norms a layer, two
    # tables and the last norm.
    "qwen3.5-27b": (
        QWEN_3_5_DENSE,
        48 * 115_876_064 + 16 * 104_858_112 + 64 * (267_386_880 + 2 * 5120)
        + (2 * 248_320 + 1) * 5120,
    ),
}  # fmt: skip


#: Windows as (tokens, layers), the others' attention being over the whole context.
WINDOWED: list[tuple[Config, tuple[int, int]]] = [
    (MISTRAL_1, (4096, 32)),
    (PHI_3_4K, (2047, 32)),
    (GEMMA_2_9B, (4096, 21)),  # every other layer
    (GEMMA_3_4B, (1024, 29)),  # five of six of 34 layers
    (GPT_OSS_20B, (128, 12)),  # as the types say
    (LLAMA_4_SCOUT, (8192, 36)),  # all but every fourth
    (_model(QWEN_2, use_sliding_window=True, max_window_layers=21), (4096, 7)),  # from a layer on
    (
        _model(
            QWEN_3,
            layer_types=["full_attention"] * 30 + ["sliding_attention"] * 6,
            sliding_window=2048,
            use_sliding_window=True,
        ),
        (2048, 6),
    ),
]


NVFP4: Config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
_GPTQ: Config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_MODELOPT_FP8: Config = {"quant_method": "modelopt", "quant_algo": "FP8"}
_SOME = {"g": {"weights": _FP8, "input_activations": _FP8, "targets": ["re:.*experts.*"]}}
_AWQ: Config = {**_GPTQ, "quant_method": "awq", "modules_to_not_convert": None}
_RULE = {r"-:model\.layers\.\d+\.mlp\.gate$": {}}
_SPARSE = {"format": "dense"}
#: Sections and the formats of weights and KV cache that they mean.
QUANTISED: dict[str, tuple[Config, tuple[str, str]]] = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, ("fp8", "bf16")),
    "fp8 in blocks": (FP8_BLOCKS, ("fp8_block", "bf16")),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, ("fp8", "bf16")),
    "gptq": (_GPTQ, ("int4_wo", "bf16")),
    "awq": (_AWQ, ("int4_wo", "bf16")),
    "modelopt": ({**NVFP4, "exclude_modules": ["lm_head"]}, ("nvfp4", "fp8")),
    "compressed fp8": (
        _packed(_FP8, _FP8, ignore=["lm_head"], sparsity_config=_SPARSE), ("fp8", "bf16")
    ),
    "compressed nvfp4": (
        _packed(_NVFP4, _NVFP4, kv_cache_scheme={"type": "float", "num_bits": 8}), ("nvfp4", "fp8")
    ),
    "compressed int4": (_packed(_INT4), ("int4_wo", "bf16")),
    "gptq with a rule": ({**_GPTQ, "dynamic": _RULE}, ("int4_wo", "bf16")),
}  # fmt: skip


def _each(base: Config, *cases: tuple[Config, str], inside: str = "") -> list[tuple[Config, str]]:
    """The base with each change (of the part ``inside``), and how the line goes on after the name
    of the file."""
    part = base.get(inside, {})
    changes = [({inside: {**part, **c}} if inside else c, message) for c, message in cases]
    return [({**base, **change}, message) for change, message in changes]


_IN, _NOT = "config_groups.'group_0'.", "not supported"
#: Sections that are refused in a Llama, and how the line goes on after "quantization_config.".
UNQUANTISED: list[tuple[Config, str]] = [
    ({"quant_method": "bitsandbytes"}, f"quant_method 'bitsandbytes': {_NOT}"),
    ({"quant_method": "mxfp4"}, f"quant_method 'mxfp4': {_NOT}: this model has"),
    (_GPTQ | {"bits": 8}, f"bits 8: {_NOT}"),
    (_GPTQ | {"quant_method": "awq", "group_size": 32}, "group_size 32: not supp"),
    (_packed({**_INT4, "group_size": 32}), f"group_size 32: {_NOT}; allowed"),
    (_packed({**_INT4, "group_size": 16}),
     f"{_IN}weights.group_size 16: {_NOT}; allowed: 128, 32"),
    ({**FP8_BLOCKS, "weight_block_size": [64, 64]}, "weight_block_size [64, 64]: not"),
    ({**FP8_BLOCKS, "weight_block_size": 128}, "weight_block_size 128: not"),
    (_packed({"type": "int", "num_bits": 8}), f"{_IN}weights.type 'int'"),
    (_MODELOPT_FP8 | {"quant_algo": "MIXED_PRECISION"},
     f"quant_algo 'MIXED_PRECISION': {_NOT}; allowed: FP8, NVFP4"),
    ({**FP8_BLOCKS, "modules_to_not_convert": ["model.layers.0.self_attn"]},
     f"modules_to_not_convert 'model.layers.0.self_attn': {_NOT}: all matrices"),
    (_packed(_FP8, _FP8, kv_cache_scheme={"type": "int", "num_bits": 8}), "kv_cache_scheme {"),
    (_packed(_FP8), f"{_IN}input_activations None: {_NOT}; allowed: float 8"),
    (_packed(_NVFP4, _FP8), f"{_IN}input_activations {{'type': 'float', "),
    (_packed(_FP8, _FP8, sparsity_config={"format": "sparse-24-bitmask"}),
     f"sparsity_config.format 'sparse-24-bitmask': {_NOT}; allowed: dense"),
    ({"quant_method": "compressed-tensors", "config_groups": _SOME},
     f"config_groups.'g'.targets ['re:.*experts.*']: {_NOT}"),
    (_GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}},
     f"dynamic '+:.*down_proj': {_NOT}: all matrices"),
    (_GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]},
     f"modules_in_block_to_quantize [['self_attn.q_proj']]: {_NOT}"),
]  # fmt: skip
_ALL = "model.layers.*.mlp"
#: What may not be left out of DeepSeek-V3's and Nemotron 3's layers, whose 52 blocks are 29 layers
#: here: block 51 is none of MTP.
KEPT: list[tuple[Config, object, str]] = [
    (DEEPSEEK_V3, "model.layers.0.self_attn", f": {_NOT}: the whole attention in 1 of 61"),
    (DEEPSEEK_V3, f"{_ALL}.shared_experts", f": {_NOT}: the whole attention in 0"),
    (DEEPSEEK_V3, "model.layers.3.mlp*", f" 'model.layers.3.mlp*': {_NOT}: all matrices"),
    (DEEPSEEK_V3, f"{_ALL}.experts", f" '{_ALL}.experts': {_NOT}: all"),
    (DEEPSEEK_V3, 7, " 7: must be the name of a module"),
    *(
        (NEMOTRON_3_NANO, name, f" '{name}': {_NOT}")
        for name in (f"backbone.layers.{block}.mixer.in_proj" for block in (12, 28, 29, 51))
    ),
]

#: Values that change the cost of a Llama and are not supported.
COSTLY: Config = {
    "sliding_window": 4096, "num_local_experts": 8, "num_experts": 64, "n_routed_experts": 256,
    "num_experts_per_tok": 2, "kv_lora_rank": 512, "hidden_act": "xielu", "use_qk_norm": True,
    "torch_dtype": "float8_e4m3fn", "attention_chunk_size": 8192, "final_logit_softcapping": 30.0,
    "is_encoder_decoder": True, "pruned_heads": {"0": [1]},
    "architectures": ["LlamaForSequenceClassification"],
}  # fmt: skip

_POSITIVE = "must be a positive integer"
#: Configurations that are refused, and how the line goes on after the name of the file.
REFUSED: list[tuple[Config, str]] = [
    ({"peft_type": "LORA", "r": 16}, "key 'peft_type': is of an adapter: give the"),
    ({"dim": 4096, "n_layers": 32}, "key 'n_layers': is of Mistral's own params"),
    *_each(
        GLM_5,
        ({"index_topk_freq": 4}, f"index_topk_freq 4: {_NOT}: layers that "),
        ({"indexer_types": [*["full"] * 77, "shared"]},
         "indexer_types ['full', 'full', 'full', 'full', 'full',… (626 characters): not supported"),
    ),
    *_each(
        DEEPSEEK_V3_2,
        ({"model_type": "deepseek_v4"},
         "model_type 'deepseek_v4': not modelled: sparse attention whose layers share an indexer"),
        ({"index_n_heads": 0}, f"index_n_heads {_POSITIVE}, got 0"),
    ),
    *_each(
        NEMOTRON_3_NANO,
        ({"hybrid_override_pattern": "M-M*-"},
         f"hybrid_override_pattern 'M-M*-': {_NOT}; allowed: M and *, each with or without"),
        ({"hybrid_override_pattern": "MEM*E"},
         "hybrid_override_pattern must have num_hidden_layers (52) letters, got 5"),
        ({"moe_latent_size": 1024}, "moe_latent_size 1024: not"),
        ({"mamba_ssm_cache_dtype": "float8"},
         f"mamba_ssm_cache_dtype 'float8': {_NOT}; allowed: float32, bfloat16, float16"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias True: not"),
    ),
    *_each(
        QWEN_3_NEXT,
        ({"layer_types": ["sliding_attention"] * 48},
         f"layer_types 'sliding_attention': {_NOT}; allowed: full_attention, linear_attention"),
        ({"layer_types": ["linear_attention"] * 48},
         "recurrent.full_layers must name some of the layers, not all"),
        ({"linear_num_value_heads": 24}, "recurrent: value {'full_layers"),
    ),
    *_each(QWEN_3_30B, ({"attn_output_gate": True}, "attn_output_gate True: not sup")),
    *_each(
        QWEN_2,
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 32}},
         "model_type 'qwen2_vl': not modelled: models that read images or sound; the text part"),
    ),
    *_each(
        GEMMA_2_9B,
        ({"model_type": "gemma3n", "hidden_size_per_layer_input": 256},
         "model_type 'gemma3n': not modelled: Gemma 3n: its layers share"),
        ({"layer_types": ["linear_attention"] * 42},
         f"layer_types 'linear_attention': {_NOT}; allowed: full_attention, sliding_"),
    ),
    *_each(DEEPSEEK_V3, ({"index_topk": 64}, "index_topk 64: not supp")),
    *_each(MINIMAX_M2, ({"attn_type_list": [0] * 62}, "attn_type_list [0, 0, 0, 0, ")),
    *_each(GEMMA_3_4B, ({"text_config": None}, "text_config None: must hold the sizes of the te")),
    *_each(
        LLAMA_3,
        ({"architectures": ["LlamaForCausalLMEagle3"]},
         f"architectures ['LlamaForCausalLMEagle3']: {_NOT}: only models with an LM head, whose "
         "names end in ForCausalLM or LMHeadModel; an EAGLE-3 drafter is `speculation.method"),
        ({"model_type": "granitemoe", "num_local_experts": 32, "logits_scaling": 6.0},
         "model_type 'granitemoe': not modelled: Granite mixtures of experts: their parameter"),
        ({"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.8333},
         "model_type 'cohere': not modelled: Command R and R+: attention and FFN of a layer run"),
        ({"model_type": "olmo2"},
         "model_type 'olmo2': not modelled: OLMo 2 and 3: norms come after attention and FFN"),
        ({"model_type": "kimi_linear", "linear_num_key_heads": 16},
         "model_type 'kimi_linear': not modelled: linear attention other than gated delta nets"),
        ({"model_type": "bloom"}, "model_type 'bloom' is not supported; allowed: deepseek"),
        ({"hidden_size": None}, "key 'hidden_size' is missing"),
        ({"hidden_size": "big"}, f"hidden_size {_POSITIVE}, got 'big'"),
        ({"num_key_value_heads": 5}, "num_heads (32) must be a multiple of num_kv_heads"),
        ({"hidden_size": 10**12}, "hidden_size must be at most 16777216, got 1000000000000"),
        ({"vocab_size": 10**400}, "vocab_size must be at most 16777216, got 1000"),
        ({"hidden_size": 2**23}, f"hidden_size must be at most {LARGEST['hidden_size']}"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers must be at most 4096, got 5000"),
        ({"vocab_size": 1e5}, f"vocab_size {_POSITIVE}, got 100000.0"),
        ({"vocab_size": float("inf")}, f"vocab_size {_POSITIVE}, got inf"),
        ({"hidden_size": 4097, "head_dim": None}, "hidden_size (4097) must be a multiple of"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"layer_types": 7}, f"layer_types 7: {_NOT}"),
        ({"architectures": "Llama"}, f"architectures 'Llama': {_NOT}"),
        ({"architectures": [3]}, f"architectures [3]: {_NOT}"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types ['full_attention', 'full_"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types ['sliding_attention', "),
        *(({key: value}, f"{key} {value!r}: {_NOT}") for key, value in COSTLY.items()),
    ),
    *_each(
        LLAMA_4_SCOUT,
        ({"no_rope_layer_interval": 0}, f"no_rope_layer_interval {_POSITIVE}, "),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step must be a positive int"),
        ({"num_hidden_layers": 2**24}, "num_hidden_layers must be at most 4096"),
        ({"moe_layers": 3}, "moe_layers must be a list, got 3"),
        ({"num_experts_per_tok": 17}, "experts: value {'num_experts': 16, 'top_k': 17"),
        ({"attention_chunk_size": "all"}, f"attention_chunk_size {_POSITIVE}"),
        inside="text_config",
    ),
    *(
        ({**LLAMA_3, "quantization_config": section}, f"quantization_config.{message}")
        for section, message in UNQUANTISED
    ),
    *(
        (
            {**base, "quantization_config": {**NVFP4, "ignore": ["lm_head", name]}},
            f"quantization_config.ignore{message}",
        )
        for base, name, message in KEPT
    ),
]  # fmt: skip

#: Texts that are no configuration.
NO_CONFIGURATION = [
    ("[" * 100_000 + "]" * 100_000, "not valid JSON: nested too deeply"),
    ('{"model_type": ' + '{"a":' * 100_000, "not valid JSON: nested too deeply"),
    ('{"vocab_size": ' + "9" * 5000 + "}", "not valid JSON: Exceeds the limit"),
    ('{"vocab_size": 1, "vocab_size": 2}', "not valid JSON: key 'vocab_size' is given twice"),
    ("{} " + " " * 9_000_000, "holds 9,000,003 bytes: must be at most 8,388,608"),
    ("[]", "expected a JSON object"),
]
