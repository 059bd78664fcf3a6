"""Names on the Hugging Face Hub: which published checkpoints have the shape of a shipped model.

They stand under ``hub`` in the model's YAML, each with the address where it was read. They are no
part of a ModelSpec, which describes an architecture.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from sarathi_sim.profiler.facts.formats import KvDtype, MoeDtype, WeightDtype
from sarathi_sim.profiler.storage.paths import data_dir
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import parse, strict_dataclass

#: The key of a model's YAML with its names on the Hub.
HUB = "hub"


@strict_dataclass
class Checkpoint:
    """A published checkpoint: its name on the Hub, the page that shows it, its number formats.

    ``kv_cache_dtype`` is fp8 where its quantisation file was seen to say so. With ``custom_code``
    engines run Python code that it brings, for which they want the user's consent.
    """

    name: str
    page: str
    dtype: WeightDtype = "bf16"
    kv_cache_dtype: KvDtype = "bf16"
    moe_dtype: MoeDtype | None = None
    custom_code: bool = False


@strict_dataclass
class _Listed:
    hub: tuple[Checkpoint, ...] = ()


def list_models() -> list[str]:
    """Names of the shipped models, sorted."""
    return sorted(path.stem for path in (data_dir() / "models").glob("*.yaml"))


@lru_cache(maxsize=1)
def _by_model() -> dict[str, tuple[Checkpoint, ...]]:
    paths = {name: data_dir() / "models" / f"{name}.yaml" for name in list_models()}
    return {name: _listed(path) for name, path in paths.items()}


def _listed(path: Path) -> tuple[Checkpoint, ...]:
    found = read_mapping(path)
    return parse(_Listed, {HUB: found.get(HUB, [])}, path).hub


def checkpoints(model: str) -> tuple[Checkpoint, ...]:
    """Those of a shipped model, of each number format the preferred one first; () for others."""
    return _by_model().get(model.lower(), ())


@lru_cache(maxsize=1)
def published() -> dict[str, tuple[str, Checkpoint]]:
    """The shipped model and the checkpoint by every known name on the Hub."""
    return {one.name: (model, one) for model, found in _by_model().items() for one in found}


def find_published(name: str) -> tuple[str, Checkpoint] | None:
    """The shipped model and the checkpoint of a name on the Hub, in small or capital letters."""
    return {known.lower(): found for known, found in published().items()}.get(name.lower())
