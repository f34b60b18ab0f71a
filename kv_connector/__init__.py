"""kvferry's vLLM side: connector, spec, workers and remote tier; the entry point of the plugin.

vLLM calls `register` through the `vllm.general_plugins` entry point in the front end, the engine
core and the workers, in some processes more than once, even if kvferry is not used. So this module
imports nothing of vLLM before that call, and the connector only when an operator names it.
"""

import functools
import logging
from contextlib import suppress

__version__ = "0.1.0"

# The vLLM release lines that the test suite runs against.
TESTED_VLLM = ("0.32",)

CONNECTOR = "KVFerryConnector"


@functools.cache
def register() -> None:
    """Make `"kv_connector": "KVFerryConnector"` work without a module path. Idempotent.

    Never raises: an exception would end a vLLM that does not use kvferry. The name is registered
    in every version of vLLM. The connector refuses an unsupported vLLM with a better message than
    vLLM's for an unknown name.
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
