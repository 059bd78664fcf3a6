"""The names on the Hub of the shipped models."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from profiler.facts.hub import checkpoints, published
from profiler.facts.model import list_models, load_model


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


def test_a_name_leads_to_its_model_and_formats() -> None:
    model, one = published()["nvidia/Qwen3-32B-NVFP4"]
    assert (model, one.dtype, one.kv_cache_dtype) == ("qwen3-32b", "nvfp4", "fp8")
    assert published()["openai/gpt-oss-20b"][1].moe_dtype == "w4a16_mxfp4"
