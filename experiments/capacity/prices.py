"""What GPUs cost: a YAML of the user's, or assumptions that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sarathi_sim.experiments.config.errors import ConfigError
from sarathi_sim.profiler.storage.files import data_dir, user_path
from sarathi_sim.profiler.storage.plain_yaml import read_mapping
from sarathi_sim.profiler.storage.strict import STRICT, did_you_mean, parse


@dataclass(frozen=True)
class Prices:
    """``gpu_hour``: what an hour of one GPU costs, by device; as of ``date``. ``mark`` says where
    the numbers are from: ``assumed``, or ``given``."""

    __pydantic_config__: ClassVar = STRICT

    date: str
    gpu_hour: dict[str, Annotated[float, Field(ge=0, le=1e6)]]
    currency: str = "USD"
    mark: Literal["assumed", "given"] = "given"

    @property
    def stated(self) -> dict[str, str]:
        """Where they are from, as results have it."""
        return {"date": self.date, "currency": self.currency, "mark": self.mark}

    def of(self, device: str) -> float:
        """An hour of one GPU. Raises ConfigError where the price is not known."""
        if device not in self.gpu_hour:
            raise ConfigError(
                f"prices: gpu_hour.{device}: this key is missing"
                f"{did_you_mean(device, self.gpu_hour)}: give --prices with it"
            )
        return self.gpu_hour[device]


def load_prices(path: str | None) -> Prices:
    """The user's prices, or the shipped ones. Raises ConfigError, a line per mistake."""
    file: Path = data_dir() / "prices.yaml" if path is None else user_path(path)
    return parse(Prices, read_mapping(file), file)


def per_million_tokens(gpu_hour: float, gpus: int, output_tokens_per_s: float) -> float:
    """What a million output tokens cost at that throughput."""
    if not output_tokens_per_s:
        return float("inf")
    return gpu_hour * gpus / 3600 / output_tokens_per_s * 1e6


def add_costs(row: dict[str, Any], per_hour: float) -> None:
    """Add to a deployment what an hour of it costs, and to it and each of its probes what a million
    output tokens do. Its own are those at the rate that was asked for, or at its capacity; None
    where it does not carry that."""
    row["per_hour"], at = per_hour, row.get("at_capacity")
    asked = row.get("at_rate")
    for probe in (*row.get("curve", ()), *filter(None, (at, asked))):
        tokens = probe["output_tokens_per_s"]
        probe["per_million_output_tokens"] = per_million_tokens(per_hour, 1, tokens)
    known = at and row["settled"] and row["capacity"]
    there = (asked or at) if known else None
    row["per_million_output_tokens"] = there["per_million_output_tokens"] if there else None
