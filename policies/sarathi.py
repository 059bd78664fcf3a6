"""Sarathi: chunked prefills and decode-maximal batching (sections 4.2 to 4.4 of the paper)."""

from __future__ import annotations

from typing import Literal

from policies.policy import DECODES, Chunking, Plan, View, named

ChunkRule = Literal["fill", "reserve", "fixed"]


@named("sarathi")
class Sarathi:
    """One prefill chunk an iteration, and every decode of the micro-batch piggybacks on it.

    ``chunk_size`` C is the token budget of an iteration and ``tile`` T the tile size of the GPU's
    matrix multiplications. How many prompt tokens go with ``d`` decodes:

    ``fill``     ``C - d``: chunk and decodes together make C tokens
    ``reserve``  ``C - (B - 1)``: room for the most decodes that may ever piggyback (section 4.4)
    ``fixed``    ``C``: the decodes come on top, and may spill into one more tile

    For the first two, C is rounded down to a multiple of T (if it is at least T); when the decodes
    alone fill C, to the next multiple of T above them, so that prefills always make progress. The
    rows of the fused operations are then a multiple of T too: always under ``fill``, and under
    ``reserve`` when as many decodes piggyback as may. The last chunk of a prompt is what is left
    of it.
    """

    holds_finished = False

    def __init__(
        self, chunk_size: int = 256, tile: int = 128, chunk_rule: ChunkRule = "fill"
    ) -> None:
        if chunk_size < 1 or tile < 1:
            raise ValueError(f"chunk_size and tile must be at least 1, not {chunk_size} and {tile}")
        if chunk_rule not in ("fill", "reserve", "fixed"):
            raise ValueError(f"chunk_rule must be fill, reserve or fixed, not {chunk_rule!r}")
        self.chunk_size = chunk_size
        self.tile = tile
        self.chunk_rule = chunk_rule
        self.chunking = Chunking(chunk_size, max(chunk_size, tile))
        self._tokens: dict[tuple[int, int], int] = {}  # chunk_tokens, by its arguments

    def chunk_tokens(self, decodes: int, max_batch: int) -> int:
        """Prompt tokens that may go with ``decodes`` decodes; at least 1."""
        if self.chunk_rule == "fixed":
            return self.chunk_size
        tile = self.tile if self.chunk_size >= self.tile else 1
        piggybacked = decodes if self.chunk_rule == "fill" else max(decodes, max_batch - 1)
        total = self.chunk_size // tile * tile
        if piggybacked >= total:
            total = (piggybacked // self.tile + 1) * self.tile
        return total - piggybacked

    def plan(self, view: View) -> Plan | None:
        sequence = view.prefilling[0] if view.prefilling else view.next_waiting()
        if sequence is None:
            return DECODES if view.num_decodes else None
        key = (view.num_decodes, view.max_batch)
        tokens = self._tokens.get(key)
        if tokens is None:
            tokens = self._tokens[key] = self.chunk_tokens(*key)
        left = sequence.prompt_tokens - sequence.prefilled
        return Plan(((sequence, tokens if tokens < left else left),))
