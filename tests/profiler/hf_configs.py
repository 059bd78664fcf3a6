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

# Totals of the model cards' safetensors.
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
    "qwen-72b": (QWEN_1, 72_287_920_128),
    "gpt2": (GPT_2, 124_439_808),
}

WINDOW = "sliding_window 4096: not supported: attention is modelled over the whole context"
REFUSED: dict[str, tuple[Config, tuple[str, ...]]] = {
    "mistral-7b-v0.1": ({**MISTRAL_3, "vocab_size": 32000, "sliding_window": 4096}, (WINDOW,)),
    "phi-3-mini-4k": (
        {**PHI_3_128K, "max_position_embeddings": 4096, "sliding_window": 2047},
        ("sliding_window 2047: not supported",),
    ),
    "mixtral-8x7b": (
        {
            **MISTRAL_3,
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.02,
        },
        (
            "model_type 'mixtral' is not supported: it is a mixture of experts; allowed: gpt2,",
            "num_local_experts 8: not supported: only dense FFNs are modelled",
            "num_experts_per_tok 2: not supported: only dense FFNs",
        ),
    ),
    "gemma-2-9b": (
        {
            **_sizes(42, 3584, 16, 8, 14336, 256000),
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        (
            "model_type 'gemma2' is not supported: it has sliding windows, capped logits",
            "attn_logit_softcapping 50.0: not supported: only softmax attention without a cap",
            "final_logit_softcapping 30.0: not supported",
            WINDOW,
        ),
    ),
    "gemma-3-4b": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {"hidden_size": 2560, "sliding_window": 1024},
            "vision_config": {"hidden_size": 1152},
        },
        (
            "model_type 'gemma3' is not supported: it reads images",
            "text_config {",
            "only decoders of text are modelled",
            "architectures ['Gemma3ForConditionalGeneration']: not supported: only models with an",
        ),
    ),
    "deepseek-v3": (
        {
            **_sizes(61, 7168, 128, 128, 18432, 129280),
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
        },
        (
            "model_type 'deepseek_v3' is not supported: it is a mixture of experts with latent",
            "kv_lora_rank 512: not supported: only keys and values of whole heads",
            "q_lora_rank 1536: not supported",
            "n_routed_experts 256: not supported: only dense FFNs",
            "quantization_config {",
            "no quantization",
            "num_nextn_predict_layers 1: not supported: one token",
        ),
    ),
    "gpt-oss-20b": (
        {
            **_sizes(24, 2880, 64, 8, 2880, 201088),
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "num_local_experts": 32,
            "quantization_config": {"quant_method": "mxfp4"},
            "sliding_window": 128,
        },
        (
            "model_type 'gpt_oss' is not supported: it is a mixture of experts with sliding",
            "layer_types ['sliding_attention', 'full_attention', …",
            "num_local_experts 32: not supported",
            "sliding_window 128: not supported",
            "quantization_config {'quant_method': 'mxfp4'}: not supported",
        ),
    ),
}
