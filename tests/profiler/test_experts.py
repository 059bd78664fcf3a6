"""Mixtures of experts: parameters against published counts, shapes, and what a file may say."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from sarathi_sim.profiler.facts.model import Experts, ModelSpec, load_model
from sarathi_sim.profiler.facts.ops import MOE, OPS, Stream
from sarathi_sim.profiler.storage.strict import SpecError, parse

# Totals of the checkpoints (safetensors), and the active parameters that the model cards state;
# gpt-oss's leave the embedding out. Not counted are gpt-oss's sinks (one number a head and layer)
# and the bias of DeepSeek's routing.
PUBLISHED = {
    "mixtral-8x7b": (46_702_792_704, 12.9e9),
    "qwen3-30b-a3b": (30_532_122_624, 3.3e9),
    "qwen3-235b-a22b": (235_093_634_560, 22e9),
    "gpt-oss-20b": (20_914_757_184 - 24 * 64, 3.61e9),
    "gpt-oss-120b": (116_829_156_672 - 36 * 64, 5.13e9),
    "deepseek-v3": (671_026_419_200 - 58 * 256, 37e9),
}
# DeepSeek-V3's layers with the attention of a plain model: three dense layers, one shared expert.
LIKE_DEEPSEEK = ModelSpec(
    "like-deepseek", 61, 7168, 128, 128, 128, 18432, True, 129280, False, 4096,
    experts=Experts(256, 8, 2048, shared_intermediate_size=2048, dense_layers=(0, 1, 2)),
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    model, (total, active) = load_model(name), PUBLISHED[name]
    assert model.num_parameters == total
    embedding = model.vocab_size * model.hidden_size if "gpt-oss" in name else 0
    assert model.active_parameters - embedding == pytest.approx(active, rel=0.03)


def test_shared_experts_and_dense_layers_count_where_they_are() -> None:
    model = LIKE_DEEPSEEK
    attention, norms = 4 * 7168 * 128 * 128, 2 * 7168
    dense = 3 * (attention + 3 * 7168 * 18432)
    assert model.parameters_in(range(3)) == (0, dense, 3 * norms)
    routed, matrices, plain = model.parameters_in(range(3, 61))
    assert routed == 58 * 256 * 3 * 7168 * 2048
    assert matrices == 58 * (attention + 3 * 7168 * 2048)
    assert plain == 58 * (norms + 256 * 7168)
    unused = 58 * 248 * 3 * 7168 * 2048
    assert model.active_parameters == model.num_parameters - unused


def test_a_bias_of_every_expert_and_of_the_router_counts() -> None:
    """gpt-oss-20b: 32 experts of 2880 x 2880, gate and up of 5760."""
    model = replace(
        LIKE_DEEPSEEK, hidden_size=2880, num_heads=64, num_kv_heads=8, head_dim=64, num_layers=1,
        ffn_hidden_size=0, experts=Experts(32, 4, 2880, bias=True),
    )  # fmt: skip
    routed, _, plain = model.parameters_in()
    assert routed == 32 * (2880 * 5760 + 5760 + 2880 * 2880 + 2880)
    assert plain - replace(model, experts=Experts(32, 4, 2880)).parameters_in().plain == 32


def test_ops_of_a_mixture() -> None:
    model = load_model("qwen3-30b-a3b")
    assert MOE in model.row_ops and not {"ffn_ln1", "ffn_ln2", "shared_ln1"} & set(model.row_ops)
    gemms = model.gemms(4)
    assert (gemms["moe_router"].n, gemms["moe_router"].k) == (128, 2048)  # whole on every rank
    assert MOE not in load_model("llama-3-8b").row_ops
    assert {"ffn_ln1", "shared_ln1", "shared_ln2", MOE} <= set(LIKE_DEEPSEEK.row_ops)
    assert LIKE_DEEPSEEK.share("ffn_ln1") == pytest.approx(3 / 61)
    assert LIKE_DEEPSEEK.share(MOE) == pytest.approx(58 / 61)
    assert LIKE_DEEPSEEK.share("preproj") == 1


def test_flops_are_those_of_the_chosen_experts() -> None:
    model = load_model("mixtral-8x7b")
    attention = (32 + 2 * 8) * 128 * 4096 + 4096 * 4096
    expected = 2 * 32 * (attention + 8 * 4096 + 2 * 3 * 4096 * 14336)
    assert model.linear_flops_per_token() == expected


def test_activations_of_dense_layers_and_shared_experts_are_elementwise() -> None:
    streams = OPS["others"].streams
    assert streams is not None
    found = streams(LIKE_DEEPSEEK.shard(8))
    acts = [stream for stream in found if stream.kernel == "act"]
    assert acts == [
        Stream("act", 3 * 18432 // 8, times=pytest.approx(3 / 61)),
        Stream("act", 3 * 2048 // 8, times=pytest.approx(58 / 61)),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 200}, "top_k must be from 1 to num_experts"),
        ({"num_experts": 0}, "num_experts must be from 1"),
        ({"dense_layers": [2, 1]}, "dense_layers must rise"),
        ({"dense_layers": [48]}, "dense_layers must be below num_layers"),
        ({"choose": 3}, "unknown key"),
        ({"top_k": "8"}, "top_k"),
    ],
)
def test_a_wrong_mixture_is_refused(change: dict[str, object], message: str) -> None:
    fields = asdict(load_model("qwen3-30b-a3b"))
    fields["experts"] = {**fields["experts"], **change}
    with pytest.raises(SpecError, match=message):
        parse(
            ModelSpec, {**fields, "ffn_hidden_size": 6144 if "dense_layers" in change else 0}, "f"
        )


def test_a_dense_width_without_dense_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="ffn_hidden_size must be 0 without dense layers"):
        replace(load_model("qwen3-30b-a3b"), ffn_hidden_size=6144)


def test_ranks_that_divide_neither_width_nor_number_of_experts_are_refused() -> None:
    model = replace(load_model("mixtral-8x7b"), experts=Experts(6, 2, 100))
    with pytest.raises(ValueError, match="divides neither the experts' intermediate_size"):
        model.check_tp(8)
    model.check_tp(2)
