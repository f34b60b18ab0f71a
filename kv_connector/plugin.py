"""Registers the connector under its short name in every vLLM process.

vLLM calls `register` through the `vllm.general_plugins` entry point in the front end, the
engine core and the workers, in some processes more than once, whether or not kvferry is used.
"""

import functools
import logging
from contextlib import suppress

from kv_connector import TESTED_VLLM

CONNECTOR = "KVFerryConnector"


@functools.cache
def register() -> None:
    """Make `"kv_connector": "KVFerryConnector"` work without a module path. Idempotent.

    Never raises: that would end a vLLM that does not use kvferry. The connector itself is
    imported when an operator names it, and refuses a vLLM that it does not support, so its name
    is registered in every version; without it vLLM could only answer that the name is unknown.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        with suppress(ValueError):  # registered already
            KVConnectorFactory.register_connector(CONNECTOR, "kv_connector.connector", CONNECTOR)
    except Exception as error:
        logging.getLogger("vllm.kvferry.plugin").warning(
            "%s is not registered: kvferry supports vLLM %s, and here %s",
            CONNECTOR,
            ", ".join(TESTED_VLLM),
            error,
        )
