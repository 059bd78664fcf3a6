"""The names on the Hub of the shipped models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sarathi_sim.profiler.facts.model import checkpoints, list_models, load_model, published
from sarathi_sim.profiler.storage.not_modelled import not_modelled
from tests.profiler.hf_configs import LLAMA_3


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


def test_what_was_never_published_has_no_name() -> None:
    assert checkpoints("gpt3-175b") == checkpoints("tiny-llama-40m") == ()
    assert checkpoints("no-such-model") == ()


@pytest.mark.parametrize("name", published())
def test_a_name_is_taken_where_a_model_is(name: str) -> None:
    shipped, one = published()[name]
    found = load_model(name)
    assert found == replace(
        load_model(shipped),
        dtype=one.dtype,
        kv_cache_dtype=one.kv_cache_dtype,
        moe_dtype=one.moe_dtype,
    )
    assert load_model(name.lower()) == found and not not_modelled(name, "model")


def test_a_folder_of_that_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "Qwen" / "Qwen3-8B"
    own.mkdir(parents=True)
    assert load_model("Qwen/Qwen3-8B").name == "qwen3-8b"  # an empty folder is no model
    (own / "config.json").write_text(json.dumps(LLAMA_3))
    assert load_model("Qwen/Qwen3-8B").num_layers == LLAMA_3["num_hidden_layers"]
    assert load_model("Qwen3-8B") == load_model("qwen3-8b")


def test_a_name_leads_to_its_model_and_formats() -> None:
    model, one = published()["nvidia/Qwen3-32B-NVFP4"]
    assert (model, one.dtype, one.kv_cache_dtype) == ("qwen3-32b", "nvfp4", "fp8")
    assert published()["openai/gpt-oss-20b"][1].moe_dtype == "w4a16_mxfp4"
