"""How measured servers with prefill and decode on separate workers were started.

A launch list has a row for each measured one (``id``): the layout of both pools (``prefill_workers,
prefill_tp, prefill_ep, prefill_dp_attention``, the same of ``decode``) and, as ``prefill:KEY`` and
``decode:KEY``, the engine's own settings. SemiAnalysis InferenceX publishes its run lists
(``.github/configs/nvidia-master.yaml``), NVIDIA the recipes that they name (NVIDIA/srt-slurm).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

POOLS = ("prefill", "decode")
_Count = Annotated[int, Field(ge=1, le=2**24)]
_Chunk = Annotated[int, Field(ge=-1, le=2**24)]
"""-1 and 0 are SGLang's words for no chunks."""


class StartedPool(BaseModel):
    """One pool: ``tp`` are the GPUs of a worker, each with attention of its own under
    ``dp_attention``. The other keys are the engines' settings by their names."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    workers: _Count
    tp: _Count
    ep: _Count = 1
    dp_attention: bool = False
    max_batch_size: _Count | None = None
    max_num_tokens: _Count | None = None
    free_share: float | None = Field(None, alias="kv_cache_config.free_gpu_memory_fraction")
    static_share: float | None = Field(None, alias="mem-fraction-static")
    chunked_prefill_size: _Chunk | None = Field(None, alias="chunked-prefill-size")
    max_prefill_tokens: _Count | None = Field(None, alias="max-prefill-tokens")
    max_running_requests: _Count | None = Field(None, alias="max-running-requests")
    recv_interval: _Count | None = Field(None, alias="scheduler-recv-interval")
    a2a: str | None = Field(None, alias="moe-a2a-backend")
    redundant: _Count | None = Field(None, alias="ep-num-redundant-experts")
    slots: _Count | None = Field(None, alias="load_balancer.num_slots")
    nextn: _Count | None = Field(None, alias="speculative_config.num_nextn_predict_layers")
    steps: _Count | None = Field(None, alias="speculative-num-steps")

    @property
    def ranks(self) -> int:
        """Ranks of data-parallel attention."""
        return self.tp if self.dp_attention else 1

    @property
    def layout(self) -> str:
        """In a word: ``2x dp8``."""
        return f"{self.workers}x {'dp' if self.dp_attention else 'tp'}{self.tp} ep{self.ep}"


class StartedServer(BaseModel):
    """How one row was started, by the first recipe that fits it, without pools where none does.
    ``speculation`` is none, mtp, or both possible."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Annotated[str, Field(min_length=1, max_length=300)]
    speculation: str = "none"
    prefill: StartedPool | None = None
    decode: StartedPool | None = None

    @property
    def draft_length(self) -> int:
        """Drafted tokens a decode; 0 where there are none, or may be none."""
        if self.speculation != "mtp" or self.decode is None:
            return 0
        return self.decode.nextn or self.decode.steps or 0

    @property
    def layout(self) -> str:
        """Of both pools, in words; empty where it is not known."""
        if self.prefill is None or self.decode is None:
            return ""
        drafts = f", {self.draft_length} drafts" if self.draft_length else ""
        return f"{self.prefill.layout} + {self.decode.layout}{drafts}"

    @model_validator(mode="before")
    @classmethod
    def _pools(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of each pool as one value."""
        found: dict[str, Any] = {}
        for name, value in given.items():
            pool = name.partition("_")[0].partition(":")[0]
            if pool in POOLS and name not in POOLS:
                found.setdefault(pool, {})[name[len(pool) + 1 :]] = value
            else:
                found[name] = value
        return found
