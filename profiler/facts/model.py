"""A transformer decoder as the simulator sees it: sizes, parameters, and every op's shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from profiler.facts.hf_config import model_fields, read_json
from profiler.facts.hf_keys import short
from profiler.facts.ops import GEMMS, LAYER_GEMMS, OPS, GemmShape, Shard
from profiler.storage.paths import data_dir, user_path
from profiler.storage.plain_yaml import read_mapping
from profiler.storage.strict import STRICT, SpecError, did_you_mean, parse

#: Bounds on a model's sizes, several times what any model has.
LARGEST = {
    "num_layers": 4096,
    "hidden_size": 2**18,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "head_dim": 2**13,
    "ffn_hidden_size": 2**20,
    "vocab_size": 2**23,
    "max_position_embeddings": 2**24,
}


@dataclass(frozen=True)
class ModelSpec:
    """The architecture of a decoder-only transformer.

    ``attention_bias`` says which attention projections carry a bias (``qkv`` as in Qwen, ``all`` as
    in GPT-3). ``gated_ffn`` means gate and up projections (SwiGLU). ``learned_positions`` adds a
    trained position table of ``max_position_embeddings`` rows. ``qk_norm`` norms each head of
    queries and keys (as in Qwen 3). Raises ValueError for sizes that are not positive, too large
    (``LARGEST``) or do not divide.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

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

    def __post_init__(self) -> None:
        for key, most in LARGEST.items():
            value = getattr(self, key)
            if value <= 0:
                raise ValueError(f"{key} must be positive, got {short(value)}")
            if value > most:
                raise ValueError(f"{key} must be at most {most}, got {short(value)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )

    # Parameters -----------------------------------------------------------------------------

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: projections, biases and norms."""
        gemms = self.gemms(tp=1)
        biases = sum(gemms[op].n for op in self.biased_gemms)
        norms = 2 * self.hidden_size * (2 if self.norm_bias else 1)
        norms += 2 * self.head_dim if self.qk_norm else 0
        return self.layer_weights(tp=1) + biases + norms

    @property
    def biased_gemms(self) -> frozenset[str]:
        """The GEMMs that add a bias."""
        shard = self.shard(1)
        return frozenset(op for op in GEMMS if OPS[op].biased(shard))

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; tied embeddings count once."""
        tables = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        if self.learned_positions:
            tables += self.max_position_embeddings * self.hidden_size
        final_norm = self.hidden_size * (2 if self.norm_bias else 1)
        return self.num_layers * self.layer_parameters + tables + final_norm

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes of KV cache one token takes in the whole model (all layers, all heads)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    # Shapes under tensor parallelism ----------------------------------------------------------

    def check_tp(self, tp: int) -> None:
        """Raises ValueError where the model cannot be split over ``tp`` ranks."""
        if tp < 1:
            raise ValueError(f"tp must be at least 1, got {tp}")
        for key in ("num_heads", "ffn_hidden_size"):
            value = getattr(self, key)
            if value % tp:
                raise ValueError(f"{self.name}: tp {tp} does not divide {key} ({value})")
        kv_heads = self.num_kv_heads
        if kv_heads % tp and tp % kv_heads:
            raise ValueError(
                f"{self.name}: tp {tp} neither divides num_kv_heads ({kv_heads}) "
                "nor is a multiple of it"
            )

    def heads_per_rank(self, tp: int) -> tuple[int, int]:
        """(query heads, KV heads) on one rank; beyond one KV head a rank, they are replicated."""
        self.check_tp(tp)
        return self.num_heads // tp, max(1, self.num_kv_heads // tp)

    def gemms(self, tp: int) -> dict[str, GemmShape]:
        """Every GEMM of one rank: those of a layer, and the LM head.

        The LM head's vocabulary is padded so that each rank holds a multiple of 64 columns, as
        engines do to stay on fast kernels. Raises ValueError where ``tp`` does not fit the model.
        """
        shard = self.shard(tp)
        return {name: op.shape(shard) for name, op in OPS.items() if op.shape is not None}

    def shard(self, tp: int) -> Shard:
        """What one of ``tp`` ranks holds. Raises ValueError where ``tp`` does not fit the model."""
        heads, kv_heads = self.heads_per_rank(tp)
        return Shard(
            hidden=self.hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            ffn=self.ffn_hidden_size // tp,
            vocab_columns=-(-self.vocab_size // (64 * tp)) * 64,
            gated_ffn=self.gated_ffn,
            attention_bias=self.attention_bias,
            ffn_bias=self.ffn_bias,
            norm_bias=self.norm_bias,
            qk_norm=self.qk_norm,
            learned_positions=self.learned_positions,
        )

    def layer_weights(self, tp: int) -> int:
        """Numbers in the matrices of one layer on one of ``tp`` ranks."""
        gemms = self.gemms(tp)
        return sum(gemms[op].n * gemms[op].k for op in LAYER_GEMMS)

    # Floating-point operations, for utilisation -----------------------------------------------

    def linear_flops_per_token(self) -> int:
        """FLOPs of all layers' GEMMs for one token (2 per weight), without LM head."""
        return 2 * self.num_layers * self.layer_weights(tp=1)

    def lm_head_flops_per_token(self) -> int:
        """FLOPs of the LM head for one token whose logits are needed."""
        return 2 * self.hidden_size * self.vocab_size


def list_models() -> list[str]:
    """Names of the shipped models, sorted."""
    return sorted(path.stem for path in (data_dir() / "models").glob("*.yaml"))


def load_model(name_or_path: str | Path) -> ModelSpec:
    """A shipped model by name, or the model of a Hugging Face ``config.json`` (file or folder).

    Raises SpecError for an unknown name (and lists the known ones), and for an invalid file.
    """
    path = user_path(name_or_path)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        return _from_hugging_face(path)
    shipped = data_dir() / "models" / f"{name_or_path}.yaml"
    if path.suffix == ".yaml":
        shipped = path
    elif str(name_or_path) not in list_models():
        raise SpecError(
            f"unknown model {str(name_or_path)!r}"
            f"{did_you_mean(str(name_or_path), list_models())}; "
            f"shipped: {', '.join(list_models())}; or the path of a Hugging Face config.json"
        )
    if not shipped.is_file():
        raise SpecError(f"{shipped}: no such file")
    return parse(ModelSpec, read_mapping(shipped), shipped)


def _from_hugging_face(path: Path) -> ModelSpec:
    config = read_json(path)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return parse(ModelSpec, {"name": name, **model_fields(config, str(path))}, path)
