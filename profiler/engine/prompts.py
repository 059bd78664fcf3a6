"""Prompts made of random token ids, some of which begin alike. No torch."""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import sha256

import numpy as np

from sarathi_sim.policies.request import Request
from sarathi_sim.profiler.engine.work import EngineError


class Prompts:
    """Draws the prompt of each request, from ``seed`` and its id; what it shares, from the name.

    Under each name of a :data:`~sarathi_sim.policies.request.Prefix` stand the tokens from the
    beginning on, so that a turn of a session begins with those before it, what was generated
    included.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed
        self._named: dict[Hashable, tuple[list[int], np.random.Generator]] = {}

    def draw(self, request: Request) -> list[int]:
        """The token ids of a prompt."""
        tokens: list[int] = []
        for name, until in request.prefix:
            digest = sha256(str(name).encode()).digest()[:8]
            rng = np.random.default_rng([self._seed, int.from_bytes(digest)])
            named, rng = self._named.setdefault(name, (list(tokens), rng))
            until = min(until, request.prompt_tokens)
            named += rng.integers(self._vocab_size, size=max(until - len(named), 0)).tolist()
            tokens += named[len(tokens) : until]
        own = np.random.default_rng([self._seed, request.id])
        rest = request.prompt_tokens - len(tokens)
        tokens += own.integers(self._vocab_size, size=rest).tolist()
        return tokens

    def generated(self, request: Request, tokens: list[int]) -> None:
        """Note the last of a request's ``tokens``, if others may begin with it.

        Raises EngineError where one has begun with another token.
        """
        for name, until in request.prefix:
            if len(tokens) > until:
                continue
            named = self._named[name][0]
            if len(named) < len(tokens):
                named.append(tokens[-1])
            elif named[len(tokens) - 1] != tokens[-1]:
                raise EngineError(
                    f"a request that goes on from request {request.id} came before that had ended: "
                    "its prompt is not known then"
                )
