"""A second connector for MultiConnector tests: it always offers the same hit."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class OtherMetadata(KVConnectorMetadata):
    """Nothing."""


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """Offers ``tokens`` of its extra config, synchronously, when nothing is local."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._tokens = self._kv_transfer_config.kv_connector_extra_config["tokens"]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return (0 if num_computed_tokens else self._tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return OtherMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
