"""A transformer decoder as the simulator sees it: sizes, parameters, and every op's shape; and
names on the Hugging Face Hub.

The published checkpoints of a shipped model are listed under ``hub`` in its YAML, each with the
address where it was read. They are no part of a ModelSpec, which describes an architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property, lru_cache, partial
from math import gcd
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ..storage.files import data_dir, user_path
from ..storage.not_modelled import not_modelled
from ..storage.plain_yaml import read_mapping
from ..storage.strict import (
    SpecError,
    did_you_mean,
    parse,
    short,
    strict_dataclass,
)
from .formats import KvDtype, MoeDtype, WeightDtype
from .hf_config import MOST_LAYERS, model_fields, plain_name, read_config
from .layer_kinds import MOST_WIDE, Indexer, Latent, Recurrent, Windows
from .layer_kinds import Experts as Experts
from .ops import ALL_ROW_OPS, OPS, GemmShape, Layers, Shard
from .roofline import Array, attended, attended_within

#: The key of a model's YAML with its names on the Hub.
HUB = "hub"


@strict_dataclass
class Checkpoint:
    """A published checkpoint: its name on the Hub, the page that shows it, its number formats.
    ``kv_cache_dtype`` is fp8 if its quantisation file says so. With ``custom_code`` engines run its
    own Python code, which needs the user's consent."""

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
    """The checkpoints of a shipped model (else none), the preferred one of each format first."""
    return _by_model().get(model.lower(), ())


@lru_cache(maxsize=1)
def published() -> dict[str, tuple[str, Checkpoint]]:
    """The shipped model and the checkpoint by every known name on the Hub."""
    return {one.name: (model, one) for model, found in _by_model().items() for one in found}


def find_published(name: str) -> tuple[str, Checkpoint] | None:
    """The shipped model and the checkpoint of a name on the Hub, in small or capital letters."""
    return {known.lower(): found for known, found in published().items()}.get(name.lower())


#: Bounds on a model's sizes, several times what any model has.
LARGEST = {
    "num_layers": MOST_LAYERS,
    "hidden_size": 2**18,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "head_dim": 2**13,
    "ffn_hidden_size": MOST_WIDE,
    "vocab_size": 2**23,
    "max_position_embeddings": 2**24,
}


class LayerParameters(NamedTuple):
    """Parameters of layers: of the ``routed`` experts, of the other ``matrices``, and the ``plain``
    ones that stay in bf16 (routers, convolutions, biases, norms)."""

    routed: int
    matrices: int
    plain: int


@strict_dataclass
class ModelSpec:
    """The architecture of a decoder-only transformer.

    ``attention_bias`` says which attention projections carry a bias (``qkv`` as in Qwen, ``all`` as
    in GPT-3). ``gated_ffn`` means gate and up projections (SwiGLU). ``learned_positions`` adds a
    trained position table of ``max_position_embeddings`` rows. ``qk_norm`` norms each head of
    queries and keys (as in Qwen 3); ``norm_over_heads`` all heads together, so that ranks add up
    their squares (MiniMax M2). ``experts`` makes layers mixtures; ``ffn_hidden_size`` is 0
    where that leaves no dense one. ``norms_per_layer`` are those of hidden states (4 in Gemma).
    ``windows`` limit the context of layers. With ``latent`` attention there is one KV head, and
    ``head_dim`` is that of queries; an ``indexer`` makes it sparse. ``recurrent`` layers take the
    place of attention in some. ``output_gate``: attention's output is gated, by a projection as
    wide as its queries'. ``dtype``, ``kv_cache_dtype`` and ``moe_dtype`` (of
    experts, if another) are the checkpoint's.
    Raises ValueError for sizes that are not positive, too large (``LARGEST``) or do not divide.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    gated_ffn: bool
    vocab_size: int
    tied_embeddings: bool
    max_position_embeddings: int
    learned_positions: bool = False
    attention_bias: Literal["none", "qkv", "all"] = "none"
    ffn_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    norm_over_heads: bool = False
    experts: Experts | None = None
    norms_per_layer: Literal[2, 4] = 2
    windows: Windows | None = None
    latent: Latent | None = None
    indexer: Indexer | None = None
    recurrent: Recurrent | None = None
    output_gate: bool = False
    dtype: WeightDtype = "bf16"
    kv_cache_dtype: KvDtype = "bf16"
    moe_dtype: MoeDtype | None = None

    def __post_init__(self) -> None:
        for key, most in LARGEST.items():
            value = getattr(self, key)
            if key == "ffn_hidden_size" and not self.num_dense_layers:
                if value != 0:
                    raise ValueError(f"{key} must be 0 without dense layers, got {short(value)}")
            elif value <= 0:
                raise ValueError(f"{key} must be positive, got {short(value)}")
            if value > most:
                raise ValueError(f"{key} must be at most {most}, got {short(value)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        named = {"recurrent.full_layers": self.recurrent.full_layers if self.recurrent else ()}
        if self.experts is not None:
            named["dense_layers"] = self.experts.dense_layers
            named["bare_layers"] = self.experts.bare_layers
        for key, layers in named.items():
            if any(not 0 <= layer < self.num_layers for layer in layers):
                raise ValueError(f"{key} must be below num_layers ({self.num_layers})")
        if self.windows is not None and self.windows.layers > self.num_layers:
            raise ValueError(f"windows.layers must be at most num_layers ({self.num_layers})")
        if self.indexer is not None and (self.latent is None or not self.latent.query_rank):
            raise ValueError("an indexer needs latent attention with a query_rank")
        if self.recurrent is not None:
            if self.windows is not None or self.latent is not None:
                raise ValueError(
                    "recurrent layers beside windows or latent attention: not modelled"
                )
            if not 0 < len(set(self.recurrent.full_layers)) < self.num_layers:
                raise ValueError("recurrent.full_layers must name some of the layers, not all")
        if self.latent is not None:
            head = self.latent.nope_dim + self.latent.rope_dim
            if (self.num_kv_heads, self.head_dim) != (1, head):
                raise ValueError(
                    f"with latent attention num_kv_heads must be 1 and head_dim {head} (nope_dim + "
                    f"rope_dim), got {self.num_kv_heads} and {self.head_dim}"
                )

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense feed-forward network."""
        return len(self.kinds["dense"])

    @cached_property
    def kinds(self) -> dict[Layers, frozenset[int]]:
        """The layers (from 0) of each kind: with attention or recurrent; with a dense feed-forward
        network, with a mixture, or with none."""
        every, mix = frozenset(range(self.num_layers)), self.experts
        full = frozenset(self.recurrent.full_layers) if self.recurrent else every
        dense = frozenset(mix.dense_layers) if mix else every
        bare = frozenset(mix.bare_layers if mix else ())
        return {
            "all": every,
            "attention": full,
            "recurrent": every - full,
            "dense": dense,
            "sparse": every - dense - bare,
            "bare": bare,
        }

    @property
    def formats(self) -> dict[str, str]:
        """The checkpoint's number formats that are not bf16."""
        own = {key: getattr(self, key) for key in ("dtype", "kv_cache_dtype", "moe_dtype")}
        return {key: value for key, value in own.items() if value not in ("bf16", None)}

    # Parameters -----------------------------------------------------------------------------

    def parameters_in(self, layers: range | None = None, tp: int = 1) -> LayerParameters:
        """Parameters of these layers (default all) on ``tp`` ranks together. Replicated parameters
        count on each rank: routers, norms, replicated KV heads, the own projections of latent
        attention, and the biases of outputs that ranks add up."""
        chosen = range(self.num_layers) if layers is None else layers
        counts = {kind: len(layers.intersection(chosen)) for kind, layers in self.kinds.items()}
        matrices = plain = 0
        for op, shape in self.gemms(tp).items():
            if OPS[op].part == "layer":
                count = tp * counts[OPS[op].layers]
                plain += count * shape.n if op in self.biased_gemms else 0
                if OPS[op].split is None:
                    plain += count * shape.n * shape.k
                else:
                    matrices += count * shape.n * shape.k
        norm = self.hidden_size * (2 if self.norm_bias else 1)
        norms = self.norms_per_layer * norm * counts["all"] - norm * counts["bare"]
        own = 2 * self.head_dim if self.qk_norm else 0
        own += self.latent.query_rank + self.latent.kv_rank if self.latent else 0
        own += 2 * self.indexer.dim if self.indexer else 0
        norms += own * counts["attention"]
        if self.recurrent is not None:
            plain += self.recurrent.plain_parameters * counts["recurrent"]
        routed = 0
        if self.experts is not None:
            routed = self.experts.num_experts * self.expert_parameters
            norms += self.hidden_size * counts["sparse"] if self.experts.shared_gate else 0
        return LayerParameters(counts["sparse"] * routed, matrices, plain + tp * norms)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert of one layer; 0 without."""
        if self.experts is None:
            return 0
        wide = self.experts.intermediate_size * (2 if self.gated_ffn else 1)
        biases = wide + self.hidden_size if self.experts.bias else 0
        return self.hidden_size * (wide + self.experts.intermediate_size) + biases

    @cached_property
    def biased_gemms(self) -> frozenset[str]:
        """The GEMMs that add a bias."""
        shard = self.shard(1)
        return frozenset(op for op, known in OPS.items() if known.biased(shard))

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        tables = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        if self.learned_positions:
            tables += self.max_position_embeddings * self.hidden_size
        final_norm = self.hidden_size * (2 if self.norm_bias else 1)
        return sum(self.parameters_in()) + tables + final_norm

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but the experts not chosen for it."""
        if self.experts is None:
            return self.num_parameters
        unused = self.experts.num_experts - self.experts.top_k
        return self.num_parameters - len(self.kinds["sparse"]) * unused * self.expert_parameters

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes of KV cache one token takes in the whole model (all layers, all heads). Layers with
        a window are among them: up to its length they hold every token. Recurrent ones hold
        none."""
        return len(self.kinds["attention"]) * self.cached_bytes(1, dtype_bytes)

    def cached_bytes(self, tp: int, dtype_bytes: int) -> int:
        """Bytes that one of ``tp`` ranks caches of one token in one layer with attention. Kernels
        of sparse latent attention read fp8 with a float32 scale for 128 numbers, and the position
        in bf16: 656 bytes for DeepSeek V3.2 (vLLM's ``fp8_ds_mla``, SGLang's NSA cache)."""
        if self.latent is not None and self.indexer is not None:
            rank, rope = self.latent.kv_rank, self.latent.rope_dim
            scaled = rank + 4 * -(-rank // 128) + 2 * rope
            vector = scaled if dtype_bytes == 1 else dtype_bytes * self.latent.cached
            return vector + self.indexer.key_bytes
        if self.latent is not None:
            return self.latent.cached * dtype_bytes
        return 2 * self.heads_per_rank(tp)[1] * self.head_dim * dtype_bytes

    def kept_tokens(self, context: Array, state: Array | float = 0.0) -> Array:
        """Tokens of a sequence of ``context`` that a mean layer keeps: windows drop older ones, and
        a recurrent layer's state takes as much memory as ``state`` tokens."""
        return self.mean_layer(context, partial(np.minimum, context), state)

    def mean_layer(
        self, whole: Array, within: Callable[[int], Array], state: Array | float = 0.0
    ) -> Array:
        """The mean over the layers of the values for ``whole`` contexts, ``within`` a window, and
        with a recurrent ``state``."""
        if self.windows is None and self.recurrent is None:
            return whole
        if self.recurrent is not None:
            share = self.share_of("recurrent")
            return np.asarray((1 - share) * whole + share * state)
        assert self.windows is not None
        share = self.windows.layers / self.num_layers
        return np.asarray((1 - share) * whole + share * within(self.windows.tokens))

    # Shapes under tensor parallelism ----------------------------------------------------------

    def check_tp(self, tp: int) -> None:
        """Raises ValueError where the model cannot be split over ``tp`` ranks."""
        if tp < 1:
            raise ValueError(f"tp must be at least 1, got {tp}")
        mix = self.experts
        divided = {"num_heads": self.num_heads, "ffn_hidden_size": self.ffn_hidden_size}
        divided |= {"shared_intermediate_size": mix.shared_intermediate_size} if mix else {}
        for key, value in divided.items():
            if value % tp:
                raise ValueError(f"{self.name}: tp {tp} does not divide {key} ({value})")
        kv_heads = self.num_kv_heads
        if kv_heads % tp and tp % kv_heads:
            raise ValueError(
                f"{self.name}: tp {tp} neither divides num_kv_heads ({kv_heads}) "
                "nor is a multiple of it"
            )
        if mix is not None and mix.intermediate_size % tp and mix.num_experts % tp:
            raise ValueError(
                f"{self.name}: tp {tp} divides neither the experts' intermediate_size "
                f"({mix.intermediate_size}) nor num_experts ({mix.num_experts})"
            )
        if self.recurrent is not None:
            self.recurrent.heads_per_rank(tp)

    def check_plain(self, what: str, mixtures: bool = False) -> None:
        """Raises ValueError for a model whose parts only the tables of serving stacks know.
        ``mixtures``: those of experts without biases, in all layers, are let through."""
        mix = self.experts
        parts = {
            "a mixture of experts": mix and not mixtures,
            "dense layers beside sparse ones": mixtures and mix and mix.dense_layers,
            "layers without a network": mix and mix.bare_layers,
            "experts with biases": mixtures and mix and mix.bias,
            "sliding windows": self.windows,
            "latent attention": self.latent,
            "recurrent layers": self.recurrent,
            "gate of attention's output": self.output_gate,
            f"{self.norms_per_layer} norms a layer": self.norms_per_layer > 2,
        }
        if found := [name for name, there in parts.items() if there]:
            raise ValueError(f"{self.name} has {', '.join(found)}, not supported by {what}")

    def heads_per_rank(self, tp: int) -> tuple[int, int]:
        """(query heads, KV heads) on one rank; beyond one KV head a rank, they are replicated."""
        self.check_tp(tp)
        return self.num_heads // tp, max(1, self.num_kv_heads // tp)

    def gemms(self, tp: int) -> dict[str, GemmShape]:
        """Every GEMM of one rank: those of a layer, and the LM head. The LM head's vocabulary is
        padded so that each rank holds a multiple of 64 columns, as engines do to stay on fast
        kernels. Raises ValueError where ``tp`` does not fit the model."""
        shard = self.shard(tp)
        return {
            name: op.shape(shard)
            for name, op in OPS.items()
            if op.shape is not None and op.present(shard)
        }

    @cached_property
    def row_ops(self) -> tuple[str, ...]:
        """The ops of ``linear.csv`` that this model has, in the registry's order."""
        shard = self.shard(1)
        return tuple(op for op in ALL_ROW_OPS if OPS[op].present(shard))

    def share(self, op: str) -> float:
        """The share of the layers that run a layer's op."""
        return self.share_of(OPS[op].layers)

    def share_of(self, kind: Layers) -> float:
        """The share of the layers that are of a kind."""
        if kind == "dense":  # from the others, so that the shares add up to 1 without rounding
            return 1 - (len(self.kinds["sparse"]) + len(self.kinds["bare"])) / self.num_layers
        return len(self.kinds[kind]) / self.num_layers

    def shard(self, tp: int) -> Shard:
        """The shard of one of ``tp`` ranks. Raises ValueError if ``tp`` does not fit the model."""
        (heads, kv_heads), mix = self.heads_per_rank(tp), self.experts
        own = {each.name for each in fields(Shard)} & {each.name for each in fields(self)}
        return Shard(
            **{name: getattr(self, name) for name in own - {"experts"}},
            hidden=self.hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            ffn=self.ffn_hidden_size // tp,
            vocab_columns=-(-self.vocab_size // (64 * tp)) * 64,
            experts=mix.num_experts if mix else 0,
            shared_ffn=mix.shared_intermediate_size // tp if mix else 0,
            shared_gate=mix is not None and mix.shared_gate,
            expert_bias=mix is not None and mix.bias,
            sparse_share=self.share_of("sparse"),
            recurrent_share=self.share_of("recurrent"),
            bare_share=self.share_of("bare"),
            norms=self.norms_per_layer,
            tp=tp,
        )

    def layer_weights(self, tp: int) -> int:
        """Numbers in the matrices that a token uses in a mean layer on one of ``tp`` ranks."""
        return round(sum(self._token_weights(tp)))

    def _token_weights(self, tp: int) -> tuple[float, float, float]:
        """The numbers of :meth:`layer_weights` by the kinds of :class:`LayerParameters`."""
        own = plain = routed = 0.0
        for op, shape in self.gemms(tp).items():
            if OPS[op].part == "layer":
                numbers = self.share(op) * shape.n * shape.k
                own += numbers if OPS[op].split else 0.0
                plain += 0.0 if OPS[op].split else numbers
        if self.experts is not None:
            wide = (3 if self.gated_ffn else 2) * self.hidden_size * self.experts.intermediate_size
            routed = self.share_of("sparse") * self.experts.top_k * wide / tp
        return routed, own, plain

    # Floating-point operations, for utilisation -----------------------------------------------

    def linear_flops_by_kind(self) -> LayerParameters:
        """FLOPs of all layers' GEMMs for one token (2 per weight), without LM head, by kind of
        weights: each has a number format."""
        return LayerParameters(*(round(2 * self.num_layers * n) for n in self._token_weights(1)))

    def pairs(self, chunk: Array, context: Array, edge: float = 0.5) -> Array:
        """Query-key pairs of a chunk after ``context`` tokens, in a mean layer."""
        near = partial(attended_within, chunk, context, edge=edge)
        if self.indexer is not None:
            return near(self.indexer.top_k)
        return self.mean_layer(attended(chunk, context, edge=edge)[1], near)

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOPs of one layer's attention for one query and one key, over all heads."""
        values = self.latent.value_dim if self.latent else self.head_dim
        return 2 * self.num_heads * (self.head_dim + values)

    def lm_head_flops_per_token(self) -> int:
        """FLOPs of the LM head for one token whose logits are needed."""
        return 2 * self.hidden_size * self.vocab_size


@lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> ModelSpec:
    """A model file, read once unless it was ``changed``."""
    return parse(
        ModelSpec,
        {k: v for k, v in read_mapping(path).items() if k != HUB},
        path,
    )


def load_model(name_or_path: str | Path) -> ModelSpec:
    """A shipped model by its name or, with its number formats, by that of a published checkpoint
    (``hub`` in its YAML); or the model of a Hugging Face ``config.json`` (file or folder). Raises
    SpecError for an unknown name (and lists the known ones), and for an invalid file."""
    path, name = user_path(name_or_path), str(name_or_path)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        fields = model_fields(read_config(path), str(path))  # first: it names what cannot be read
        own = path.resolve().parent.name if path.name == "config.json" else path.stem
        return parse(ModelSpec, {"name": own, **fields}, path)
    checkpoint = None
    if path.suffix != ".yaml":
        shipped, checkpoint = find_published(name) or (name.lower(), None)
        if shipped not in list_models():
            if limit := not_modelled(name, "model"):
                raise SpecError(f"model {name!r}: {limit}")
            plain = plain_name(name)
            alike = [each for each in list_models() if plain.startswith(each)] or list_models()
            form = re.search(r"fp[48]|int4|awq|gptq", name.lower())
            said = "; a format is said by dtype, or by moe_dtype for experts alone" if form else ""
            raise SpecError(
                f"unknown model {name!r}{did_you_mean(plain, alike, 'model')}{said}; "
                f"shipped: {', '.join(list_models())}; or the path of a Hugging Face config.json"
            )
        path = data_dir() / "models" / f"{shipped}.yaml"
    if not path.is_file():
        raise SpecError(f"{path}: no such file")
    spec = _read(path, path.stat().st_mtime_ns)
    if checkpoint is None:
        return spec
    return replace(
        spec,
        dtype=checkpoint.dtype,
        kv_cache_dtype=checkpoint.kv_cache_dtype,
        moe_dtype=checkpoint.moe_dtype,
    )


#: Of the heads of a drafting layer, where the model's own share a latent.
_HEAD_DIM, _KV_HEADS = 128, 8


def drafting_layer(model: ModelSpec, method: str) -> ModelSpec:
    """The layer with which a model drafts.

    ``mtp``: a layer like the model's own, with attention over the whole context, and with experts
    where the model has some (DeepSeek V3, arXiv:2412.19437, section 2.2). ``eagle3``: one dense
    layer of its width, with the model's heads (EAGLE-3, arXiv:2503.01840); where these share a
    latent, heads are taken to be 128 wide, and those of KV at most eight. Both use the model's
    embedding and LM head. What joins their inputs (a GEMM of two or three hidden states) is left
    out.
    """
    changes: dict[str, Any] = {"num_layers": 1, "recurrent": None, "windows": None}
    changes["name"] = f"{model.name}-{method}"
    if method == "mtp":
        if model.experts is not None:
            changes["experts"] = replace(model.experts, dense_layers=(), bare_layers=())
            changes["ffn_hidden_size"] = 0
        return replace(model, **changes)
    if model.latent is not None:
        heads = max(model.hidden_size // _HEAD_DIM, 1)
        changes |= {"num_heads": heads, "num_kv_heads": gcd(_KV_HEADS, heads)}
        changes["head_dim"] = _HEAD_DIM
    return replace(
        model,
        ffn_hidden_size=model.ffn_hidden_size or 4 * model.hidden_size,
        experts=None,
        latent=None,
        indexer=None,
        output_gate=False,
        qk_norm=False,
        moe_dtype=None,
        **changes,
    )
