"""Models and devices: shapes and sizes by hand, mixtures of experts, names on the Hub, data sheets;
and what others publish of them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sarathi_sim.profiler.facts.device import list_devices, load_device
from sarathi_sim.profiler.facts.formats import Kernels
from sarathi_sim.profiler.facts.layer_kinds import Recurrent
from sarathi_sim.profiler.facts.model import (
    Experts,
    ModelSpec,
    checkpoints,
    list_models,
    load_model,
    published,
)
from sarathi_sim.profiler.facts.ops import LABELS, MOE, OPS, SENDS, GemmShape, Stream, op_label
from sarathi_sim.profiler.storage.files import data_dir
from sarathi_sim.profiler.storage.not_modelled import not_modelled
from sarathi_sim.profiler.storage.strict import SpecError, parse
from sarathi_sim.simulator.load.engine_memory import stage_weight_bytes
from tests.profiler.hf_configs import LLAMA_3


@pytest.mark.parametrize(
    ("hub", "shipped"),
    [
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("someone/Meta-Llama-3-8B-it", "llama-3-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("unsloth/gemma-3-27b-it", "gemma-3-27b"),
        ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek-v3"),
    ],
)
def test_an_unlisted_name_leads_to_the_shipped_model(hub: str, shipped: str) -> None:
    with pytest.raises(SpecError, match=rf"did you mean {re.escape(shipped)}\?"):
        load_model(hub)


def test_normed_queries_and_keys_are_one_more_elementwise_kernel() -> None:
    """Qwen3 8B on 4 ranks: 8 heads and 2 KV heads of 128 numbers are read and written."""
    streams = OPS["others"].streams
    assert streams is not None
    shard = load_model("qwen3-8b").shard(4)
    extra = set(streams(shard)) - set(streams(replace(shard, qk_norm=False)))
    assert extra == {Stream("norm", 2 * (8 + 2) * 128)}


@pytest.mark.parametrize(
    ("name", "tp", "expected"),
    [
        # GPT-3, 8 ranks: 12 heads each, 3 x 12 x 128 = 4608; FFN 49152 / 8 = 6144, not gated.
        ("gpt3-175b", 8, ((4608, 12288), (12288, 1536), (6144, 12288), (12288, 6144))),
        # LLaMA-13B: gate and up fused, 2 x 13824 = 27648.
        ("llama-13b", 1, ((15360, 5120), (5120, 5120), (27648, 5120), (5120, 13824))),
        # Llama-2-70B, 4 ranks: 16 query heads and 2 KV heads, (16 + 2 x 2) x 128 = 2560.
        ("llama-2-70b", 4, ((2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168))),
        # 16 ranks of 8 KV heads: each KV head lies on two ranks, (4 + 2) x 128 = 768.
        ("llama-2-70b", 16, ((768, 8192), (8192, 512), (3584, 8192), (8192, 1792))),
    ],
)
def test_gemm_shapes(name: str, tp: int, expected: tuple[tuple[int, int], ...]) -> None:
    gemms = load_model(name).gemms(tp)
    assert tuple(gemms)[:4] == ("preproj", "postproj", "ffn_ln1", "ffn_ln2")
    assert tuple(gemms.values())[:4] == tuple(GemmShape(n, k) for n, k in expected)


def test_flops_lm_head_and_kv_bytes() -> None:
    model = load_model("gpt3-175b")
    assert sum(model.linear_flops_by_kind()) == 2 * 96 * 12 * 12288**2
    # The LM head is padded to 64 columns a rank.
    assert model.gemms(8)["lm_head"] == GemmShape(6336, 12288)
    assert load_model("llama-13b").gemms(1)["lm_head"] == GemmShape(32000, 5120)
    assert load_model("llama-13b").kv_bytes_per_token(dtype_bytes=4) == 2 * 40 * 5120 * 4
    assert model.lm_head_flops_per_token() == 2 * 12288 * 50257


def test_unknown_names_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"did you mean llama-13b\?\); shipped: deepseek-r1"):
        load_model("llama13b")
    with pytest.raises(SpecError, match="No such file"):
        load_model(tmp_path / "config.json")
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps(LLAMA_3))
    found = load_model(tmp_path / "my-model")
    assert found == load_model(tmp_path / "my-model" / "config.json") and found.name == "my-model"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match="not valid JSON"):
        load_model(tmp_path)


def test_a_wrong_value_is_repeated_in_part(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(f"name: long\nnum_layers: {'x' * 5000}\n")
    with pytest.raises(SpecError) as caught:
        load_model(path)
    assert max(map(len, str(caught.value).splitlines())) < 500


# Mixtures of experts ---------------------------------------------------------------------------

# DeepSeek-V3's layers with the attention of a plain model: three dense layers, one shared expert.
LIKE_DEEPSEEK = ModelSpec(
    "like-deepseek", 61, 7168, 128, 128, 128, 18432, True, 129280, False, 4096,
    experts=Experts(256, 8, 2048, shared_intermediate_size=2048, dense_layers=(0, 1, 2)),
)  # fmt: skip


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
    assert sum(model.linear_flops_by_kind()) == expected


def test_activations_of_dense_layers_and_shared_experts_are_elementwise() -> None:
    streams = OPS["others"].streams
    assert streams is not None
    found = streams(LIKE_DEEPSEEK.shard(8))
    acts = [stream for stream in found if stream.kernel == "act"]
    assert acts == [
        Stream("act", 3 * 18432 // 8, times=pytest.approx(3 / 61)),
        Stream("act", 3 * 2048 // 8, times=pytest.approx(58 / 61)),
    ]


# Recurrent layers and sparse attention ------------------------------------------------------------


@given(
    keys=st.integers(1, 64), groups=st.integers(1, 8), tp=st.integers(1, 64),
    dims=st.tuples(*[st.integers(1, 256)] * 2), kind=st.sampled_from(["gdn", "mamba2"]),
)  # fmt: skip
def test_ranks_share_the_heads_of_a_recurrent_layer(
    keys: int, groups: int, tp: int, dims: tuple[int, int], kind: Literal["gdn", "mamba2"]
) -> None:
    """All ranks together hold one layer, and keys again where there are more ranks than keys."""
    layer = Recurrent((3,), keys, keys * groups, *dims, kind=kind)
    if keys * groups % tp or (keys % tp and tp % keys):
        with pytest.raises(ValueError, match=f"tp {tp} does not divide the {keys * groups} value"):
            layer.state_bytes(tp)
        return
    again = 2 * dims[0] * (max(keys, tp) - keys)
    assert tp * layer.channels(tp) == layer.channels() + again
    assert tp * layer.projected(tp) == layer.projected() + again
    assert tp * layer.state_bytes(tp) == layer.state_bytes() + 2 * 3 * again


def test_layers_without_a_network_have_no_op_of_one() -> None:
    """Nemotron 3 Nano: 23 of 29 mixers are followed by experts, without gates."""
    nano = load_model("nemotron-3-nano")
    assert not {"ffn_ln1", "ffn_ln2"} & set(nano.row_ops)
    assert nano.share(MOE) == nano.share("shared_ln1") == pytest.approx(23 / 29)
    assert nano.gemms(2)["shared_ln1"] == GemmShape(3712 // 2, 2688)
    assert nano.expert_parameters == 2 * 2688 * 1856
    streams = OPS["others"].streams
    assert streams is not None
    norms = [one for one in streams(nano.shard(1)) if one.kernel == "norm"]
    assert norms[0] == Stream("norm", 2 * 2688, times=pytest.approx(1 + 23 / 29))


QWEN, NEXT, NANO = "qwen3-30b-a3b", "qwen3-next-80b-a3b", "nemotron-3-nano"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (QWEN, {"experts": {"top_k": 200}}, "top_k must be from 1 to num_experts"),
        (QWEN, {"experts": {"num_experts": 0}}, "num_experts must be from 1"),
        (QWEN, {"experts": {"dense_layers": [2, 1]}, "ffn_hidden_size": 64}, "layers must rise"),
        (QWEN, {"experts": {"dense_layers": [48]}, "ffn_hidden_size": 64}, "below num_layers"),
        (QWEN, {"experts": {"choose": 3}}, "unknown key"),
        (QWEN, {"experts": {"top_k": "8"}}, "top_k"),
        (QWEN, {"ffn_hidden_size": 6144}, "ffn_hidden_size must be 0 without dense layers"),
        (NEXT, {"recurrent": {"number_bytes": 3}}, "number_bytes"),
        (NEXT, {"recurrent": {"kind": "rwkv"}}, "kind"),
        (NEXT, {"recurrent": {"full_layers": list(range(48))}}, "name some of the layers, not"),
        (NEXT, {"recurrent": {"full_layers": []}}, "must name some of the layers"),
        (NEXT, {"recurrent": {"full_layers": [60]}}, "full_layers must be below num_layers"),
        (NEXT, {"recurrent": {"key_dim": 0}}, "key_dim must be positive"),
        (NEXT, {"recurrent": {"value_heads": 24}}, r"\(24\) must be a multiple of key_heads \(16"),
        (NEXT, {"windows": {"tokens": 512, "layers": 3}}, "recurrent layers beside windows or lat"),
        ("glm-5", {"indexer": {"top_k": 0}}, "top_k must be positive"),
        ("glm-5", {"latent": {"query_rank": 0}}, "an indexer needs latent attention with a query_"),
        (NANO, {"experts": {"bare_layers": [6, 2]}}, "bare_layers must rise"),
        (NANO, {"experts": {"bare_layers": [29]}}, "bare_layers must be below num_layers"),
        (NANO, {"experts": {"dense_layers": [2, 4]}, "ffn_hidden_size": 64}, "layers share .2."),
        ("llama-3-8b", {"windows": {"tokens": 512, "layers": 33}}, "at most num_layers"),
        ("llama-3-8b", {"windows": {"tokens": 0, "layers": 3}}, "tokens must be positive"),
        ("deepseek-v3", {"num_kv_heads": 8}, "num_kv_heads must be 1 and head_dim 192"),
    ],
)
def test_layers_that_cannot_be(name: str, change: dict[str, Any], message: str) -> None:
    fields = asdict(load_model(name))
    for key, value in change.items():
        fields[key] = {**(fields[key] or {}), **value} if isinstance(value, dict) else value
    with pytest.raises(SpecError, match=message) as caught:
        parse(ModelSpec, fields, "f")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "tp", "message"),
    [
        ("llama-13b", 3, r"tp 3 does not divide num_heads \(40\)"),
        ("llama-33b", 8, r"tp 8 does not divide num_heads \(52\)"),
        ("llama-13b", 0, "at least 1"),
        (NANO, 3, "tp 3 "),
        (NANO, 64, "tp 64 "),
        (NEXT, 3, "tp 3 does not divide"),
    ],
)
def test_tp_that_does_not_fit(name: str, tp: int, message: str) -> None:
    model = load_model(name)
    for check in (model.check_tp, model.gemms):
        with pytest.raises(ValueError, match=message):
            check(tp)
    six = replace(load_model("mixtral-8x7b"), experts=Experts(6, 2, 100))
    six.check_tp(2)
    with pytest.raises(ValueError, match="divides neither the experts' intermediate_size"):
        six.check_tp(8)


# Names on the Hub ------------------------------------------------------------------------------


def test_a_name_belongs_to_one_model_and_has_a_page() -> None:
    listed = [one for model in list_models() for one in checkpoints(model)]
    assert len(listed) == len(published())
    for one in listed:
        owner, _, name = one.name.partition("/")
        assert owner and name
        assert urlsplit(one.page).scheme == "https"
        # A page of the Hub is the checkpoint's own.
        assert "huggingface.co" not in one.page or one.page == f"https://huggingface.co/{one.name}"


@pytest.mark.parametrize("model", list_models())
def test_the_formats_of_a_checkpoint_can_be_simulated(model: str) -> None:
    """They are formats that the model's own shape accepts; the shipped YAML's are among them."""
    spec, found = load_model(model), checkpoints(model)
    for one in found:
        replace(spec, dtype=one.dtype, kv_cache_dtype=one.kv_cache_dtype, moe_dtype=one.moe_dtype)
        assert one.moe_dtype is None or spec.experts is not None
    own = (spec.dtype, spec.kv_cache_dtype, spec.moe_dtype)
    formats = [(one.dtype, one.kv_cache_dtype, one.moe_dtype) for one in found]
    assert not formats or formats[0] == own


@pytest.mark.parametrize("name", published())
def test_a_name_is_taken_where_a_model_is(name: str) -> None:
    shipped, one = published()[name]
    found = load_model(name)
    formats = {k: getattr(one, k) for k in ("dtype", "kv_cache_dtype", "moe_dtype")}
    assert found == replace(load_model(shipped), **formats)
    assert load_model(name.lower()) == found and not not_modelled(name, "model")


def test_a_folder_of_that_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "Qwen" / "Qwen3-8B"
    own.mkdir(parents=True)
    assert load_model("Qwen/Qwen3-8B").name == "qwen3-8b"  # an empty folder is no model
    (own / "config.json").write_text(json.dumps(LLAMA_3))
    assert load_model("Qwen/Qwen3-8B").num_layers == LLAMA_3["num_hidden_layers"]
    assert load_model("Qwen3-8B") == load_model("qwen3-8b")


# Device files: what is there, and what a mistake in one says


def test_every_shipped_device_loads_under_its_own_name() -> None:
    assert list_devices() == [
        *("a100-40g-sxm", "a100-80g-sxm", "a40", "a6000", "b200-sxm", "b300-sxm", "gb200"),
        *("h100-80g-sxm", "h200-sxm", "l40s", "rtx-4090", "rtx-pro-6000"),
    ]
    assert [load_device(name).name for name in list_devices()] == list_devices()


def test_memory_is_decimal_on_the_data_sheet_and_another_number_to_the_driver() -> None:
    assert load_device("a100-80g-sxm").memory_bytes == 80e9
    assert load_device("a6000").memory_bytes == 48e9
    assert load_device("rtx-4090").reported_bytes == 25_250_627_584
    assert load_device("a100-80g-sxm").reported_bytes == pytest.approx(79.15 * 2**30, rel=1e-3)
    for name in list_devices():
        assert load_device(name).reported_bytes is not None, name


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_sms", "sms", r"mine\.yaml: sms: unknown key.*\n?.*num_sms"),
        ("num_sms: 132", "num_sms: many", "num_sms: value 'many': must be a whole number"),
        ("num_sms: 132", "num_sms: 0", "num_sms must be positive, got 0"),
        ("4800.0e+9", ".nan", "memory_bandwidth"),
        (
            "bandwidth: 450.0e+9",
            "bandwith: 1.0",
            r"intra_node\.bandwith: unknown key \(did you mean bandwidth\?\)",
        ),
    ],
)
def test_mistakes_in_a_device_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (data_dir() / "devices" / "h200-sxm.yaml").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(SpecError, match=message) as caught:
        load_device(path)
    assert str(path) in str(caught.value)


# The registry of ops: what it says, and that no other file says it again


ROOT = Path(__file__).resolve().parents[2]
#: Who may name an op: what measures it, the bundle's own tables, readers of foreign files, and what
#: the paper says of one. Everything else asks the registry.
MAY_NAME = (
    *("profiler/facts/ops.py", "profiler/measuring/", "profiler/engine/", "profiler/shard/"),
    *("profiler/bundle/tables.py", "profiler/bundle/schema.py", "profiler/physics/"),
    "experiments/lab/",
)


def test_no_other_file_names_an_op() -> None:
    found = []
    for package in ("profiler", "simulator", "experiments", "policies"):
        for path in sorted((ROOT / package).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            if not file.startswith(MAY_NAME):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
                found += [f"{file}: {text}" for text in texts if text in OPS]
    assert not found, f"ask profiler/facts/ops.py instead: {found}"


def test_every_op_has_a_name_of_its_own_in_answers() -> None:
    assert LABELS.keys() == OPS.keys() and len(set(LABELS.values())) == len(OPS)
    assert {op_label(name) for name in SENDS} == {"transfers between stages"}
    assert op_label("link speed") == "link speed"


# What others publish: parameters, weights of a GPU, KV cache of a token

GIB = 2**30
GPT_3 = 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048) * 12288 + 2 * 12288


@dataclass(frozen=True)
class Published:
    """``total`` and ``active`` parameters; ``weights`` in bytes over ``tp`` GPUs, with the error
    that their rounding allows; ``kv`` bytes a token in bf16."""

    total: float
    active: float | None = None
    active_within: float = 0.03
    weights: float | None = None
    tp: int = 1
    weights_within: float = 0.01
    kv: int | None = None


# Totals: safetensors of the model cards (of images without their encoder, and without rotary
# buffers), of LLaMA 13B and 33B the converted checkpoints, of GPT-3 its sizes; the reports and
# cards of mixtures for the active ones. KV bytes: "Insights into DeepSeek-V3" (ISCA 2025), table 1
# (405B and 72B of that table have 516,096 and 327,680 bytes), or 2 x layers x KV heads x head_dim x
# 2 of the cards. Weights: index files of the checkpoints (total_size), gpt-oss' card, vLLM's start-
# up logs.
MODELS = {
    "llama-2-7b": Published(6_738_415_616, kv=524_288),
    "llama-2-70b": Published(68_976_648_192, kv=327_680),
    "llama-13b": Published(13_015_864_320, kv=819_200),
    "llama-33b": Published(32_528_943_616, kv=1_597_440),
    "llama-3-8b": Published(8_030_261_248, kv=131_072),
    "llama-3-70b": Published(70_553_706_496, kv=327_680),
    "mistral-7b": Published(7_241_732_096, kv=131_072),
    "qwen-72b": Published(72_287_920_128, kv=2_621_440),
    "gpt3-175b": Published(GPT_3, kv=2 * 96 * 12288 * 2),
    "llama-3.1-8b": Published(8_030_261_248, weights=16_060_522_496, kv=131_072),
    "llama-3.1-70b": Published(70_553_706_496, kv=327_680),
    "llama-3.1-405b": Published(405_853_388_800, kv=516_096),
    "llama-3.2-1b": Published(1_235_814_400, kv=32_768),
    "llama-3.2-3b": Published(3_212_749_824, weights=6_425_499_648, kv=114_688),
    "llama-3.3-70b": Published(70_553_706_496, weights=32.89 * GIB, tp=4, kv=327_680),
    "qwen2.5-7b": Published(7_615_616_512, kv=57_344),
    "qwen2.5-72b": Published(72_706_203_648, weights=145_412_407_296, kv=327_680),
    "qwen3-0.6b": Published(596_049_920, kv=114_688),
    "qwen3-8b": Published(8_190_735_360, kv=147_456),
    "qwen3-14b": Published(14_768_307_200, weights=29_536_614_400, kv=163_840),
    "qwen3-32b": Published(32_762_123_264, weights=65_524_246_528, kv=262_144),
    "mistral-small-24b": Published(23_572_403_200, kv=163_840),
    "phi-4": Published(14_659_507_200, kv=204_800),
    "gemma-2-9b": Published(9_241_705_984, kv=344_064),
    "gemma-3-12b": Published(11_766_034_176, kv=393_216),
    "gemma-3-27b": Published(27_009_346_304, kv=507_904),
    "mixtral-8x7b": Published(46_702_792_704, 12.9e9, kv=131_072),
    "qwen3-30b-a3b": Published(30_532_122_624, 3.3e9, kv=98_304),
    "qwen3-235b-a22b": Published(235_093_634_560, 22e9, kv=192_512),
    "qwen3-coder-480b-a35b": Published(480_154_875_392, 35e9, kv=253_952),
    # Without attention sinks: one number a head and layer. The card's active ones leave out the
    # embedding: 201,088 x 2,880.
    "gpt-oss-20b": Published(
        20_914_757_184 - 24 * 64, 3.61e9 + 579e6, 0.001, weights=12.8 * GIB, kv=49_152
    ),
    "gpt-oss-120b": Published(
        116_829_156_672 - 36 * 64, 5.13e9 + 579e6, 0.001, weights=60.8 * GIB, kv=73_728
    ),
    # The biases that correct the routing, one an expert, are left out.
    "deepseek-v3": Published(671_026_419_200 - 58 * 256, 37e9, kv=70_272),
    "deepseek-r1": Published(671_026_419_200 - 58 * 256, 37e9, kv=70_272),
    "kimi-k2": Published(1.03e12, 32e9, kv=70_272),
    # 600 GB (Unsloth's page on running it) with the encoder; groups of 128 would be 547 GB.
    "kimi-k2.5": Published(1_026_408_209_408, 32e9, weights=600e9, kv=70_272),
    "llama-4-scout": Published(107_769_861_120, 17e9, kv=196_608),
    # Without its encoder, which is Scout's.
    "llama-4-maverick": Published(401_583_781_376 - 871_932_416, 17e9, kv=196_608),
    # Its card rounds to 10 billion active ones, without the tables.
    "minimax-m2": Published(228_689_320_448, 10e9 + 2 * 200_064 * 3072, 0.1, kv=253_952),
    # Recurrent layers have no KV cache. Qwen3-Next's active ones are published without tables and
    # norms. Cards round the others: GLM-5's leaves out the embedding, DeepSeek V3.2's its indexers.
    "qwen3.5-397b-a17b": Published(396_346_350_336, 17e9, kv=15 * 2 * 2 * 256 * 2),
    "qwen3-next-80b-a3b": Published(
        79_674_391_296, 3_252_400_896 + 2 * 151_936 * 2048, 1e-4, kv=12 * 2 * 2 * 256 * 2
    ),
    "glm-5": Published(743_911_218_432 - 75 * 256, 40e9 + 154_880 * 6144, kv=78 * (576 * 2 + 132)),
    "deepseek-v3.2": Published(671_877_929_216, 37e9 + 61 * 13_959_424, kv=61 * (576 * 2 + 132)),
    "nemotron-3-nano": Published(31_577_937_344, 3.6e9, 0.01, kv=6 * 2 * 2 * 128 * 2),
}
# Bytes of a sequence's states in all layers, by hand: each head's state, and the last three inputs
# of the convolution in bf16.
STATES = {
    ("qwen3.5-397b-a17b", 1, 4): 45 * (64 * 128 * 128 * 4 + 12288 * 3 * 2),
    ("qwen3.5-397b-a17b", 8, 4): 24_007_680,
    ("qwen3.5-397b-a17b", 1, 2): 97_689_600,
    ("qwen3-next-80b-a3b", 1, 4): 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2),
    ("qwen3-next-80b-a3b", 1, 2): 39_518_208,
    ("nemotron-3-nano", 1, 4): 23 * (64 * 64 * 128 * 4 + 6144 * 3 * 2),
}
# Parameters of single layers, counted from the sizes in their files: a layer, and how many more it
# has than another.
LAYERS = {
    "a gated delta net, attention": ("qwen3.5-397b-a17b", 0, 3, 118_014_208 - 104_858_112),
    "qwen3-next's": ("qwen3-next-80b-a3b", 0, 3, 33_718_464 - 27_263_488),
    "mamba 2, attention": ("nemotron-3-nano", 0, 3, 38_744_896 - 23_399_040),
    "experts": (
        "nemotron-3-nano", 0, 2, 128 * (2 * 2688 * 1856 + 2688) + 2 * 2688 * 3712 + 2688
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "tp", "number_bytes"), STATES)
def test_states_of_a_sequence(name: str, tp: int, number_bytes: Literal[2, 4]) -> None:
    model = load_model(name)
    assert model.recurrent is not None
    state = replace(model.recurrent, number_bytes=number_bytes).state_bytes(tp)
    assert len(model.kinds["recurrent"]) * state == STATES[name, tp, number_bytes]


@pytest.mark.parametrize("what", LAYERS)
def test_parameters_of_a_layer(what: str) -> None:
    name, one, other, more = LAYERS[what]
    first, second = (sum(load_model(name).parameters_in(range(n, n + 1))) for n in (one, other))
    assert first - second == more


def test_parameters_of_latent_attention_with_an_indexer() -> None:
    """GLM-5's first layer: attention, indexer, a dense network and two norms."""
    dense = 3 * 6144 * 12288 + 2 * 6144
    assert sum(load_model("glm-5").parameters_in(range(1))) == 165_022_208 + 9_371_904 + dense


@pytest.mark.parametrize("name", MODELS)
def test_against_published_numbers(name: str) -> None:
    model, expected = load_model(name), MODELS[name]
    digits = 0 if isinstance(expected.total, int) else 5e-3
    assert model.num_parameters == pytest.approx(expected.total, rel=digits, abs=0)
    if expected.active is not None:
        assert model.active_parameters == pytest.approx(expected.active, rel=expected.active_within)
    if expected.weights is not None:
        numbers = Kernels("vllm", model.dtype, moe_dtype=model.moe_dtype).number_bytes
        weights = stage_weight_bytes(model, (model.num_layers,), 0, numbers, expected.tp)
        assert weights / expected.tp == pytest.approx(expected.weights, rel=expected.weights_within)
    assert model.kv_bytes_per_token() == expected.kv


def test_many_models_ship() -> None:
    assert len(list_models()) >= 25 and set(MODELS) <= set(list_models())
