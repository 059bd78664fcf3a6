"""``config.json`` files as Hugging Face has them: those that are modelled, and those refused."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

# What nearly every file has beside its sizes, none of which changes cost.
COMMON: Config = {
    "_name_or_path": "someone/some-model",
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
}


def _sizes(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int) -> Config:
    return {
        **COMMON,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
    }


LLAMA_2: Config = {
    **_sizes(32, 4096, 32, 32, 11008, 32000),
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
LLAMA_3: Config = {
    **LLAMA_2,
    **_sizes(32, 4096, 32, 8, 14336, 128256),
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
}
LLAMA_3_2_1B: Config = {
    **LLAMA_3,
    **_sizes(16, 2048, 32, 8, 8192, 128256),
    "head_dim": 64,
    "tie_word_embeddings": True,
}
QWEN_2: Config = {
    **_sizes(28, 3584, 28, 4, 18944, 152064),
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "use_mrope": False,
    "tie_word_embeddings": False,
}
QWEN_2_5_SMALL: Config = {
    **QWEN_2,
    **_sizes(24, 896, 14, 2, 4864, 151936),
    "layer_types": ["full_attention"] * 24,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
QWEN_3: Config = {
    **QWEN_2,
    **_sizes(36, 4096, 32, 8, 12288, 151936),
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "sliding_window": None,
}
QWEN_3_SMALL: Config = {
    **QWEN_3,
    **_sizes(28, 1024, 16, 8, 3072, 151936),
    "tie_word_embeddings": True,
}
MISTRAL_3: Config = {
    **_sizes(32, 4096, 32, 8, 14336, 32768),
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
PHI_3_128K: Config = {
    **_sizes(32, 3072, 32, 32, 8192, 32064),
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "model_type": "phi3",
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,  # never reached
    "tie_word_embeddings": False,
}
QWEN_1: Config = {
    **COMMON,
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "attn_dropout_prob": 0.0,
    "emb_dropout_prob": 0.0,
    "bf16": True,
    "fp16": False,
    "fp32": False,
    "hidden_size": 8192,
    "intermediate_size": 49152,
    "kv_channels": 128,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 32768,
    "no_bias": True,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "onnx_safe": None,
    "rotary_emb_base": 1000000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 32768,
    "tie_word_embeddings": False,
    "use_dynamic_ntk": False,
    "use_flash_attn": "auto",
    "use_logn_attn": False,
    "vocab_size": 152064,
}
GPT_2: Config = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}

MISTRAL_1: Config = {**MISTRAL_3, "vocab_size": 32000, "sliding_window": 4096}
PHI_3_4K: Config = {**PHI_3_128K, "max_position_embeddings": 4096, "sliding_window": 2047}
PHI_4: Config = {
    **PHI_3_128K,
    **_sizes(40, 5120, 40, 10, 17920, 100352),
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "sliding_window": None,
}
GEMMA_2_9B: Config = {
    **_sizes(42, 3584, 16, 8, 14336, 256000),
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
}
# What it leaves out are the type's defaults: 8 and 4 heads of 256, a vocabulary of 262,208.
GEMMA_3_4B: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
_MIXTURE: Config = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
MIXTRAL_8X7B: Config = {
    **MISTRAL_3,
    **_MIXTURE,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "vocab_size": 32000,
}
QWEN_3_30B: Config = {
    **QWEN_3,
    **_MIXTURE,
    **_sizes(48, 2048, 32, 4, 6144, 151936),
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
QWEN_3_CODER: Config = {
    **QWEN_3_30B,
    **_sizes(62, 6144, 96, 8, 8192, 151936),
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2560,
    "num_experts": 160,
    "qkv_bias": False,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}
QWEN_15_MOE: Config = {
    **QWEN_2,
    **_MIXTURE,
    **_sizes(24, 2048, 16, 16, 5632, 151936),
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "qkv_bias": True,
    "shared_expert_intermediate_size": 5632,
}
GPT_OSS_20B: Config = {
    **_sizes(24, 2880, 64, 8, 2880, 201088),
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
FP8_BLOCKS: Config = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DEEPSEEK_V3: Config = {
    **_sizes(61, 7168, 128, 128, 18432, 129280),
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8_BLOCKS,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
# 27 layers, the first of them dense, no low rank of queries.
DEEPSEEK_V2_LITE: Config = {
    **DEEPSEEK_V3,
    **_sizes(27, 2048, 16, 16, 10944, 102400),
    "architectures": ["DeepseekV2ForCausalLM"],
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "num_nextn_predict_layers": None,
    "q_lora_rank": None,
    "quantization_config": None,
    "seq_aux": True,
}
KIMI_K2: Config = {
    **DEEPSEEK_V3,
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163840,
}
LLAMA_4_SCOUT: Config = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "model_type": "llama4",
    "text_config": {
        **_sizes(48, 5120, 40, 8, 8192, 202048),
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": 4,
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "use_qk_norm": True,
    },
    "vision_config": {"model_type": "llama4_vision_model"},
}
MINIMAX_M2: Config = {
    **_sizes(62, 3072, 48, 8, 1536, 200064),
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "layernorm_full_attention_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {
        **FP8_BLOCKS,
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
}

# Totals of the model cards' safetensors; of those with images what is left without their encoder.
MODELLED = {
    "llama-2-7b": (LLAMA_2, 6_738_415_616),
    "llama-3.1-8b": (LLAMA_3, 8_030_261_248),
    "llama-3.2-1b": (LLAMA_3_2_1B, 1_235_814_400),
    "qwen2-7b": (QWEN_2, 7_615_616_512),
    "qwen2.5-0.5b": (QWEN_2_5_SMALL, 494_032_768),
    "qwen3-8b": (QWEN_3, 8_190_735_360),
    "qwen3-0.6b": (QWEN_3_SMALL, 596_049_920),
    "mistral-7b-v0.3": (MISTRAL_3, 7_248_023_552),
    "phi-3-mini-128k": (PHI_3_128K, 3_821_079_552),
    "phi-3-mini-4k": (PHI_3_4K, 3_821_079_552),
    "phi-4": (PHI_4, 14_659_507_200),
    "mistral-7b-v0.1": (MISTRAL_1, 7_241_732_096),
    "gemma-2-9b": (GEMMA_2_9B, 9_241_705_984),
    "gemma-3-4b": (GEMMA_3_4B, 3_880_263_168),
    "mixtral-8x7b": (MIXTRAL_8X7B, 46_702_792_704),
    "qwen3-30b-a3b": (QWEN_3_30B, 30_532_122_624),
    "qwen3-coder-480b-a35b": (QWEN_3_CODER, 480_154_875_392),
    # Its gates of shared experts are left out: one number of each hidden one.
    "qwen1.5-moe-a2.7b": (QWEN_15_MOE, 14_315_784_192 - 24 * 2048),
    # Attention sinks are left out: one a head.
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184 - 24 * 64),
    # Biases that correct the routing are left out: one an expert.
    "deepseek-v3": (DEEPSEEK_V3, 671_026_419_200 - 14_848),
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 15_706_484_224),
    "qwen-72b": (QWEN_1, 72_287_920_128),
    "gpt2": (GPT_2, 124_439_808),
    # Its vocabulary is this long; the model card says 228.7 billion.
    "minimax-m2": (MINIMAX_M2, 228_689_320_448),
}


#: Windows as (tokens, layers), the others' attention being over the whole context.
WINDOWED: dict[str, tuple[Config, tuple[int, int]]] = {
    "mistral: every layer": (MISTRAL_1, (4096, 32)),
    "phi3: every layer": (PHI_3_4K, (2047, 32)),
    "gemma2: every other layer": (GEMMA_2_9B, (4096, 21)),
    "gemma3: five of six, 34 layers": (GEMMA_3_4B, (1024, 29)),
    "gpt_oss: as the types say": (GPT_OSS_20B, (128, 12)),
    "llama4: all but every fourth": (LLAMA_4_SCOUT, (8192, 36)),
    "qwen2: from a layer on": (
        {**QWEN_2, "use_sliding_window": True, "max_window_layers": 21},
        (4096, 7),
    ),
    "qwen3: as the types say": (
        {
            **QWEN_3,
            "layer_types": ["full_attention"] * 30 + ["sliding_attention"] * 6,
            "sliding_window": 2048,
            "use_sliding_window": True,
        },
        (2048, 6),
    ),
}


def _packed(weights: Config, inputs: Config | None = None, **others: object) -> Config:
    group = {"weights": weights, "targets": ["Linear"], "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **others}


_FP8: Config = {"type": "float", "num_bits": 8, "strategy": "channel"}
_NVFP4: Config = {"type": "float", "num_bits": 4, "group_size": 16}
_INT4: Config = {"type": "int", "num_bits": 4, "group_size": 128}
#: Sections and the formats of weights and KV cache that they mean.
QUANTISED: dict[str, tuple[Config, tuple[str, str]]] = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, ("fp8", "bf16")),
    "fp8 in blocks": (FP8_BLOCKS, ("fp8_block", "bf16")),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, ("fp8", "bf16")),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, ("int4_wo", "bf16")),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": None},
        ("int4_wo", "bf16"),
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8",
         "exclude_modules": ["lm_head"]},
        ("nvfp4", "fp8"),
    ),
    "compressed fp8": (
        _packed(_FP8, _FP8, ignore=["lm_head"], sparsity_config={"format": "dense"}),
        ("fp8", "bf16"),
    ),
    "compressed nvfp4": (
        _packed(_NVFP4, _NVFP4, kv_cache_scheme={"type": "float", "num_bits": 8}),
        ("nvfp4", "fp8"),
    ),
    "compressed int4": (_packed(_INT4), ("int4_wo", "bf16")),
    "gptq with a rule": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128,
         "dynamic": {r"-:model\.layers\.\d+\.mlp\.gate$": {}}},
        ("int4_wo", "bf16"),
    ),
}  # fmt: skip
#: Sections that are refused, and how the line goes on after "quantization_config.".
UNQUANTISED: dict[str, tuple[Config, str]] = {
    "a method": ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes': not supported"),
    "bits": ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "bits 8: not supported"),
    "groups": ({"quant_method": "awq", "bits": 4, "group_size": 32}, "group_size 32: not supp"),
    "blocks": ({**FP8_BLOCKS, "weight_block_size": [64, 64]}, "weight_block_size [64, 64]: not"),
    "no shape": ({**FP8_BLOCKS, "weight_block_size": 128}, "weight_block_size 128: not"),
    "int8": (_packed({"type": "int", "num_bits": 8}), "config_groups.'group_0'.weights.type 'int'"),
    "mixed": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        "quant_algo 'MIXED_PRECISION': not supported; allowed: FP8, NVFP4",
    ),
    "left out": (
        {**FP8_BLOCKS, "modules_to_not_convert": ["model.layers.0.self_attn"]},
        "modules_to_not_convert 'model.layers.0.self_attn': not supported: all matrices",
    ),
    "cache": (
        _packed(_FP8, _FP8, kv_cache_scheme={"type": "int", "num_bits": 8}),
        "kv_cache_scheme {",
    ),
    "fp8 of the weights alone": (
        _packed(_FP8),
        "config_groups.'group_0'.input_activations None: not supported; allowed: float 8",
    ),
    "nvfp4 of the weights alone": (
        _packed(_NVFP4, _FP8), "config_groups.'group_0'.input_activations {'type': 'float', "
    ),
    "sparse": (
        _packed(_FP8, _FP8, sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config.format 'sparse-24-bitmask': not supported; allowed: dense",
    ),
    "some modules": (
        {"quant_method": "compressed-tensors", "config_groups":
            {"g": {"weights": _FP8, "input_activations": _FP8, "targets": ["re:.*experts.*"]}}},
        "config_groups.'g'.targets ['re:.*experts.*']: not supported",
    ),
    "rules": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128,
         "dynamic": {"+:.*down_proj": {"bits": 8}}},
        "dynamic '+:.*down_proj': not supported: all matrices",
    ),
    "some in a block": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128,
         "modules_in_block_to_quantize": [["self_attn.q_proj"]]},
        "modules_in_block_to_quantize [['self_attn.q_proj']]: not supported",
    ),
    "experts": ({"quant_method": "mxfp4"}, "quant_method 'mxfp4': not supported: this model has"),
}  # fmt: skip

REFUSED: dict[str, tuple[Config, tuple[str, ...]]] = {
    "deepseek-v3.2": (
        {**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_topk": 2048},
        (
            "model_type 'deepseek_v32': not modelled: attention that picks tokens by an index "
            "(DeepSeek V3.2); deepseek-v3 has its sizes",
        ),
    ),
    "qwen2-vl": (
        {**QWEN_2, "model_type": "qwen2_vl", "vision_config": {"depth": 32}},
        ("model_type 'qwen2_vl': not modelled: models that read images or sound; of gemma3, ",),
    ),
    "gemma-3n": (
        {**GEMMA_2_9B, "model_type": "gemma3n", "hidden_size_per_layer_input": 256},
        ("model_type 'gemma3n': not modelled: Gemma 3n: its layers share",),
    ),
    "granite-3.0-1b-a400m": (
        {
            **{**LLAMA_3, "model_type": "granitemoe", "num_local_experts": 32},
            **{"num_experts_per_tok": 8, "embedding_multiplier": 12.0, "logits_scaling": 6.0},
        },
        ("model_type 'granitemoe': not modelled: Granite mixtures of experts: no reader of their",),
    ),
    "command-r-plus": (
        {**LLAMA_3, "model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.8333},
        ("model_type 'cohere': not modelled: Command R and R+: attention and FFN of a layer run",),
    ),
    "olmo-2": (
        {**LLAMA_3, "model_type": "olmo2"},
        ("model_type 'olmo2': not modelled: OLMo 2 and 3: norms come after attention and FFN",),
    ),
    "qwen3-next": (
        {**LLAMA_3, "model_type": "qwen3_next", "linear_num_key_heads": 16},
        ("model_type 'qwen3_next': not modelled: models whose layers have linear attention",),
    ),
    "an indexed deepseek_v3": ({**DEEPSEEK_V3, "index_topk": 64}, ("index_topk 64: not supp",)),
    "types of layers": (
        {**GEMMA_2_9B, "layer_types": ["linear_attention"] * 42},
        ("layer_types 'linear_attention': not supported; allowed: full_attention, sliding_",),
    ),
    "linear layers": (
        {**MINIMAX_M2, "attn_type_list": [0] * 62},
        ("attn_type_list [0, 0, 0, 0, …",),
    ),
    "no text": (
        {**GEMMA_3_4B, "text_config": None},
        ("text_config None: must hold the sizes of the text part",),
    ),
}
