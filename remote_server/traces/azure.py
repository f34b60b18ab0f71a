"""Azure's format: times and lengths of requests to LLM services, which have no prefixes.

    TIMESTAMP,ContextTokens,GeneratedTokens

CSV, of 2023 and 2024; that of 2025 has a column `NumImages` too. Its authors cannot see the
prompts. So nothing can be replayed: the file is refused.
"""

from pathlib import Path

from remote_server.traces.collector import NO_PREFIXES
from remote_server.traces.trace import TraceError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def refusal(path: Path) -> TraceError:
    """The error, to be raised."""
    return TraceError(
        f"{path}: Azure's LLM inference traces have times and lengths only: which prompts begin "
        f"alike is not in them. {NO_PREFIXES}"
    )
