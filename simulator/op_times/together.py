"""Several chunks in one call of prefill attention: they fill the GPU together, and launch once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sarathi_sim.simulator.loop.records import Floats


@dataclass(frozen=True, eq=False)
class Together:
    """In a call of ``batches[i]`` equal chunks of n tokens, each takes ``added(n)[i]`` seconds.

    Calls of other batches lie on the line between two; beyond the largest, shares stay. A chunk of
    n tokens in a batch of N takes its share of a call of N / n such chunks: that many keep the GPU
    as busy.
    """

    batches: Floats
    added: Callable[[Floats], Floats]

    def saved(self, chunk: Floats, alone_s: Floats) -> Floats:
        """Of chunks that take ``alone_s`` alone, (gain, launch): in a batch of N tokens each takes
        ``gain - launch / N`` less. Shape (chunks, batches + 1, 2): from one batch to the next."""
        sizes, calls = self._calls(chunk, alone_s)
        slope = np.append(np.diff(calls) / np.diff(sizes), calls[:, -1:] / sizes[-1], axis=-1)
        launch = chunk[:, None] * (calls - slope * sizes)
        return np.stack([alone_s[:, None] - slope, launch], axis=-1)

    def least_s(self, chunk: Floats, alone_s: Floats) -> Floats:
        """What each chunk takes at least, alone or with others."""
        sizes, calls = self._calls(chunk, alone_s)
        return np.asarray((calls / sizes).min(axis=-1))

    def _calls(self, chunk: Floats, alone_s: Floats) -> tuple[Floats, Floats]:
        """The batches from one on, and each chunk's calls: more chunks take no less time."""
        sizes = np.append(1.0, self.batches)
        shares = np.vstack([alone_s, self.added(chunk)]).T
        return sizes, np.maximum.accumulate(sizes * shares, axis=-1)
