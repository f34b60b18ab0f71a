"""What one request may ask for over HTTP, in `kv_transfer_params`.

    {"kv_transfer_params": {"kvferry": {"load": false, "store": false}}}

`load: false` computes the prompt although it is cached below the engine, `store: false` leaves
the request's blocks out of the CPU pool and the server. A request that uses a LoRA adapter
keeps to the CPU pool: vLLM's block hash knows adapters by name and path, which says nothing
about their weights on another host. A request whose prompt another connector brings from the
engine that computed it, as Nixl does, loads nothing here: it would wait for both.
"""

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.kvferry.request_options")

OPTIONS_KEY = "kvferry"

BYPASS_KEY = "kvferry_bypass"
"""In a request's `kv_transfer_params`: the reason why it must not use the server."""

PROMPT_COMES_KEY = "do_remote_prefill"
"""vLLM's word, in a request to a decoding engine: its whole prompt was computed elsewhere."""

# vLLM's own words for "nothing of this request".
_VLLM_LIMITS = {"load": "max_load_tokens", "store": "max_offload_tokens"}


def apply_request_options(request: "Request") -> None:
    """Translate the request's options for vLLM and the remote tier, in place."""
    params: dict[str, Any] = dict(request.kv_transfer_params or {})
    options = params.get(OPTIONS_KEY)
    if isinstance(options, dict):
        for name, allowed in options.items():
            limit = _VLLM_LIMITS.get(name)
            if limit is None or not isinstance(allowed, bool):
                logger.warning(
                    "request %s: ignoring kv_transfer_params.%s.%s=%r; known: load, store, each "
                    "true or false",
                    request.request_id,
                    OPTIONS_KEY,
                    name,
                    allowed,
                )
            elif not allowed:
                params[limit] = 0
    if params.get(PROMPT_COMES_KEY):
        params[_VLLM_LIMITS["load"]] = 0
    if request.lora_request is not None:
        params[BYPASS_KEY] = "lora"
    if params:
        request.kv_transfer_params = params


def keep_to_pool(request: "Request") -> None:
    """Let the request use nothing of the server, whatever it asked for: its options could not
    be read. What it asks of other connectors stays."""
    params = request.kv_transfer_params
    others = params if isinstance(params, dict) else {}
    request.kv_transfer_params = {**others, BYPASS_KEY: "options_unread"}
