"""A KV connector of vLLM's behind which every prompt has been computed elsewhere (needs vLLM)."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base


class PromptsFromElsewhere(base.KVConnectorBase_V1):  # type: ignore[misc]
    """The KV of each prompt's tokens but the last is sent here once, whenever the recorder says.

    A preempted request finds nothing elsewhere: it computes its tokens again. Only the scheduler's
    half is here; no KV is moved.
    """

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens are sent beyond those cached here, and whether that takes time."""
        more = request.num_prompt_tokens - 1 - num_computed_tokens
        return (more, True) if more > 0 and not request.num_preemptions else (0, False)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Nothing for the workers."""
        return base.KVConnectorMetadata()

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do without KV."""

    update_state_after_alloc = start_load_kv = wait_for_layer_load = _nothing
    save_kv_layer = wait_for_save = _nothing
