"""Registers the connector under its short name in every vLLM process.

vLLM calls `register` through the `vllm.general_plugins` entry point in the front end, the
engine core and the workers, in some processes more than once.
"""

CONNECTOR = "KVFerryConnector"


def register() -> None:
    """Make `"kv_connector": "KVFerryConnector"` work without a module path. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kv_connector.connector", CONNECTOR)
