"""A Hugging Face ``config.json`` read as the fields of a ModelSpec: modelled completely or refused.

Every key that changes the cost is used (``hf_families.py``, ``hf_quantization.py``) or refused by
name (``hf_keys.py``). A warning names unknown keys. Of a model that reads images only the text part
is read.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sarathi_sim.profiler.facts.hf_families import READERS, Fields, HfConfig
from sarathi_sim.profiler.facts.hf_keys import ELSEWHERE, problems, short, unknown
from sarathi_sim.profiler.facts.hf_quantization import formats
from sarathi_sim.profiler.storage.files import read_bounded
from sarathi_sim.profiler.storage.not_modelled import not_modelled
from sarathi_sim.profiler.storage.strict import SpecError

#: Types that read images, too: the type of their text part, which is in ``text_config``.
NESTED = {"gemma3": "gemma3_text", "mistral3": "mistral", "llama4": "llama4_text"}
#: Keys beside ``text_config`` that concern the text.
_OF_THE_TEXT = ("quantization_config", "torch_dtype", "dtype", "tie_word_embeddings")


def model_fields(config: Mapping[str, Any], where: str) -> Fields:
    """The ModelSpec fields (all but ``name``) that ``config`` describes.

    ``where`` names the file in errors. Raises SpecError for an unsupported ``model_type``, for a
    key that is missing or not a positive integer, and, a line each, for every key that asks for
    something that is not modelled. Unknown keys are logged as a warning.
    """
    config = _text_part(config, where)
    kind = config.get("model_type")
    reader = HfConfig(config, where)
    if not isinstance(kind, str) or kind not in READERS:
        limit = not_modelled(kind, "model") if isinstance(kind, str) else ""
        if limit:
            raise SpecError(f"{where}: model_type {short(kind)}: {limit}")
        wrong = [
            f"model_type {short(kind)} is not supported; allowed: "
            f"{', '.join(sorted({*READERS, *NESTED}))}; where the layers are those of one of them, "
            "give a copy of the file with its model_type"
        ]
        wrong += problems(config, {*ELSEWHERE, "layer_types"})
        raise SpecError("\n".join(f"{where}: {line}" for line in wrong))
    found = READERS[kind](reader)
    found |= formats(config, found, where)
    mix = found.get("experts", {})
    if "moe_dtype" in found and (mix["shared_intermediate_size"] or mix["dense_layers"]):
        rest = "all else is taken to be bf16, shared experts and dense layers, too"
        _warn(f"note: {where}: experts in {found['moe_dtype']}, {rest}")
    reader.free("quantization_config")
    if wrong := problems(config, reader.used):
        raise SpecError("\n".join(f"{where}: {line}" for line in wrong))
    if names := unknown(config, reader.used):
        shown = ", ".join(short(name) for name in names[:20])
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        _warn(f"note: {where}: unknown keys, assumed to have no cost: {shown}{more}")
    return found


def _text_part(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """What of a configuration describes the decoder of text."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in NESTED:
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise SpecError(f"{where}: text_config {short(text)}: must hold the sizes of the text part")
    _warn(f"note: {where}: only text_config is modelled, no images and no weights of their encoder")
    above = {key: config[key] for key in _OF_THE_TEXT if key in config}
    named = {"model_type": NESTED[kind]} if "model_type" not in text else {}
    return {**above, **{k: v for k, v in text.items() if k != "architectures"}, **named}


@cache
def _warn(text: str) -> None:
    """Warn once per process: a sweep reads the same file for every run."""
    logging.getLogger(__name__).warning(text)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises SpecError where there is none, or a key is given twice."""
    content = read_bounded(path)
    try:
        config = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_once)
    except RecursionError:
        raise SpecError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise SpecError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpecError(f"{path}: expected a JSON object")
    return config


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {short(twice)} is given twice")
    return found


def plain_name(name: str) -> str:
    """A model's name on the hub as shipped models are called: no owner, no variant, small."""
    own = name.rpartition("/")[2].lower().removeprefix("meta-").replace("_", "-")
    return re.sub(r"-(instruct|chat|it|hf|bf16|fp8)\b", "", own)
