"""The entry point by which vLLM finds the connector."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from lookaside import plugin
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def test_the_name_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    plugin.register()
    plugin.register()  # vLLM may load plugins more than once in a process
    found = KVConnectorFactory.get_connector_class(
        KVTransferConfig(kv_connector="LookasideConnector", kv_role="kv_both")
    )
    from lookaside.connector import LookasideConnector

    assert found is LookasideConnector


def test_a_vllm_without_a_registry_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise TypeError("another signature")

    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    monkeypatch.setattr(KVConnectorFactory, "register_connector", refuse)
    plugin.register()
    monkeypatch.delattr(KVConnectorFactory, "_registry")
    plugin.register()


def test_it_loads_nothing_of_ours() -> None:
    code = (
        "import sys, types\n"
        "factory = types.ModuleType('factory')\n"
        "class KVConnectorFactory:\n"
        "    _registry = {}\n"
        "    register_connector = classmethod(lambda c, *a: c._registry.update({a[0]: a}))\n"
        "factory.KVConnectorFactory = KVConnectorFactory\n"
        "name = 'vllm.distributed.kv_transfer.kv_connector.factory'\n"
        "parts = name.split('.')\n"
        "for i in range(1, len(parts)):\n"
        "    sys.modules['.'.join(parts[:i])] = types.ModuleType('.'.join(parts[:i]))\n"
        "sys.modules[name] = factory\n"
        "from lookaside.plugin import register\n"
        "register()\n"
        "assert KVConnectorFactory._registry\n"
        "ours = {m for m in sys.modules if m.startswith('lookaside')}\n"
        "assert ours == {'lookaside', 'lookaside.plugin'}, ours\n"
        "assert 'numpy' not in sys.modules and 'zmq' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
