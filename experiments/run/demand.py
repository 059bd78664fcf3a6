"""The lengths of a workload's requests, as advice needs them: a sample, and a few that stand for
all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from experiments.config.errors import ConfigError
from experiments.run.traffic import FORMS, requests_of
from simulator.load.describe import lengths_line
from simulator.loop.records import Ints

LONGEST = 8192
"""Tokens of a request: as far as the machine's times go."""


@dataclass(frozen=True, eq=False)
class Demand:
    """Prompt and output tokens of requests, kept in the order of their P:D."""

    prompt: Ints
    output: Ints

    @classmethod
    def of(cls, prompt: Ints, output: Ints) -> Demand:
        """Of requests in any order."""
        order = np.argsort(prompt / output, kind="stable")
        return cls(np.asarray(prompt)[order], np.asarray(output)[order])

    @cached_property
    def length(self) -> int:
        """Tokens of the longest request."""
        return int((self.prompt + self.output).max())

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """Mean prompt and output of five equally likely parts; of one where all are alike."""
        if len(np.unique(np.stack([self.prompt, self.output]), axis=1).T) == 1:
            return [(int(self.prompt[0]), int(self.output[0]))]
        places = np.array_split(np.arange(len(self.prompt)), 5)
        pairs = [(self.prompt[at].mean(), self.output[at].mean()) for at in places if len(at)]
        return [(max(1, round(prompt)), max(1, round(output))) for prompt, output in pairs]

    def requests(self, count: int) -> tuple[Ints, Ints]:
        """Prompt and output tokens of a sample that has every P:D in proportion, shuffled but
        always the same."""
        at = ((np.arange(count) + 0.5) / count * len(self.prompt)).astype(np.int64)
        at = np.random.default_rng(0).permutation(at)
        return self.prompt[at], self.output[at]

    @property
    def ratio(self) -> str:
        """P:D, or its range."""
        ends = [f"{float(f'{self.prompt[at] / self.output[at]:.2g}'):g}" for at in (0, -1)]
        return " to ".join(dict.fromkeys(ends))

    def line(self) -> str:
        """The lengths, in words."""
        least = int((self.prompt + self.output).min())
        most = "" if least == self.length else f"{least:,} to "
        said = lengths_line(self.prompt, self.output)
        return f"requests of {most}{self.length:,} tokens in all, P:D {self.ratio}: {said}"


def demand_of(text: str) -> Demand:
    """The lengths that ``--workload`` states. Raises ConfigError for what is not allowed there."""
    word = text.replace(" ", "")
    if old := re.fullmatch(r"(\d+(?:\.\d+)?[kK]):(\d+)", word):
        raise ConfigError(
            f"--workload {text}: tokens in all with their P:D are written {old[1]}@{old[2]}; "
            f"a prompt of {old[1]} with {old[2]} output tokens {_plain(old[1])}:{old[2]}; "
            f"{FORMS}"
        )
    requests = requests_of(text)
    demand = Demand.of(
        np.array([request.prompt_tokens for request in requests]),
        np.array([request.output_tokens for request in requests]),
    )
    if demand.length > LONGEST:
        raise ConfigError(
            f"--workload {text}: its longest request has {demand.length:,} tokens; must be at most "
            f"{LONGEST:,}"
        )
    return demand


def _plain(thousands: str) -> str:
    return f"{1024 * float(thousands[:-1]):g}"
