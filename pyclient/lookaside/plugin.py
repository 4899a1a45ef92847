"""The entry point by which vLLM finds the connector: ``vllm.general_plugins``.

vLLM calls ``register`` in each of its processes, also where the connector is not used. So it must
cost nothing and never fail: it imports neither the connector nor a native module, only enters a
name.
"""

from __future__ import annotations

NAME = "LookasideConnector"
MODULE = "lookaside.connector"


def register() -> None:
    """Make ``"kv_connector": "LookasideConnector"`` known to vLLM. May be called many times.

    Where vLLM has no such registry, nothing happens: ``kv_connector_module_path`` still works, and
    its error says what is missing.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except Exception:
        import logging

        logging.getLogger("vllm.lookaside").debug("lookaside: not registered", exc_info=True)
