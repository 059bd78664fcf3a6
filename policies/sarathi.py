"""Sarathi: chunked prefills and decode-maximal batching (sections 4.2 to 4.4 of the paper)."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

from sarathi_sim.policies.policy import DECODES, Chunking, Plan, Policy, View, named
from sarathi_sim.policies.request import Sequence, check_at_least_1

ChunkRule = Literal["fill", "reserve", "fixed", "equal_time"]


@named("sarathi")
class Sarathi(Policy):
    """One prefill chunk per iteration; every decode of the micro-batch piggybacks on it.

    ``chunk_size`` C is the token budget of an iteration and ``tile`` T the tile size of the GPU's
    matrix multiplications. ``chunk_rule`` sets the prompt tokens beside ``d`` decodes:

    ``fill``     ``C - d``: chunk and decodes together make C tokens
    ``reserve``  ``C - (B - 1)``: leaves room for the largest number of decodes (section 4.4)
    ``fixed``    ``C``: the decodes come on top, and may need one more tile
    ``equal_time``  as ``fill``, but smaller if the predicted iteration would take more than
                 ``iteration_s`` seconds on the slowest stage. Chunks shrink as the context grows,
                 so the micro-batches of a pipeline take equally long

    Except under ``fixed``, C is rounded down to a multiple of T (if it is at least T). If the
    decodes alone fill C, it is the next multiple of T above them, so prefills always progress. The
    rows of the fused operations are then a multiple of T: always under ``fill`` and ``equal_time``,
    and under ``reserve`` with the largest number of decodes. A prompt's last chunk is its rest.
    """

    def __init__(
        self,
        chunk_size: int = 256,
        tile: int = 128,
        chunk_rule: ChunkRule = "fill",
        iteration_s: float | None = None,
    ) -> None:
        check_at_least_1(chunk_size=chunk_size, tile=tile)
        if chunk_rule not in ("fill", "reserve", "fixed", "equal_time"):
            raise ValueError(
                f"chunk_rule must be fill, reserve, fixed or equal_time, not {chunk_rule!r}"
            )
        self.needs_costs = chunk_rule == "equal_time"
        if self.needs_costs != (iteration_s is not None):
            raise ValueError("iteration_s must be given with chunk_rule equal_time, and only then")
        if iteration_s is not None and not iteration_s > 0:
            raise ValueError(f"iteration_s must be more than 0, not {iteration_s}")
        self.iteration_s = iteration_s
        self.chunk_size = chunk_size
        self.tile = tile
        self.chunk_rule = chunk_rule
        self.chunking = Chunking(chunk_size, max(chunk_size, tile))
        self._tokens: dict[tuple[int, int], int] = {}  # chunk_tokens, by its arguments

    def chunk_tokens(self, decodes: int, max_batch: int) -> int:
        """Prompt tokens beside ``decodes`` decodes, without regard to time; at least 1."""
        if self.chunk_rule == "fixed":
            return self.chunk_size
        tile = self.tile if self.chunk_size >= self.tile else 1
        piggybacked = max(decodes, max_batch - 1) if self.chunk_rule == "reserve" else decodes
        total = self.chunk_size // tile * tile
        if piggybacked >= total:
            total = (piggybacked // self.tile + 1) * self.tile
        return total - piggybacked

    def plan(self, view: View) -> Plan | None:
        sequence = view.prefilling[0] if view.prefilling else None
        if sequence is None and view.free_slots:
            sequence = view.next_waiting()
        if sequence is None:
            return DECODES if view.num_decodes else None
        key = (view.num_decodes, view.max_batch)
        tokens = self._tokens.get(key)
        if tokens is None:
            tokens = self._tokens[key] = self.chunk_tokens(*key)
        left = sequence.prompt_tokens - sequence.prefilled
        if self.needs_costs:
            tokens = self._in_time(view, sequence, tokens, left)
        return Plan(((sequence, tokens if tokens < left else left),))

    def _in_time(self, view: View, sequence: Sequence, most: int, left: int) -> int:
        """The largest chunk, a whole number of tiles below ``most``, that takes no more than
        ``iteration_s``; the smallest one if all take more. ``left`` is the rest of the prompt.
        """
        cost, limit = view.cost, self.iteration_s
        if cost is None or limit is None:
            raise ValueError("chunk_rule equal_time needs times, which only the simulator predicts")
        tile = self.tile if self.chunk_size >= self.tile else 1
        sizes = range(most, 0, -tile)
        first = bisect_left(
            sizes,
            True,
            key=lambda size: cost(sequence, min(size, left)) <= limit,
        )
        return sizes[min(first, len(sizes) - 1)]
