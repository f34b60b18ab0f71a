"""Lines of traces in the formats that are read."""

import json
from pathlib import Path
from typing import Any

BURST_NAMES = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
)


def mooncake(timestamp: float, tokens: int, ids: list[int], answer: int = 1) -> str:
    return json.dumps({
        "timestamp": timestamp, "input_length": tokens, "output_length": answer, "hash_ids": ids,
    })  # fmt: skip


def bailian(seconds: float, tokens: int, ids: list[int]) -> str:
    return json.dumps({
        "chat_id": 159, "parent_chat_id": -1, "timestamp": seconds, "input_length": tokens,
        "output_length": 132, "type": "text", "turn": 1, "hash_ids": ids,
    })  # fmt: skip


def recorded(timestamp: float, ids: list[int], kind: str = "lookup", **fields: Any) -> str:
    return json.dumps({
        "timestamp": timestamp, "type": kind, "namespace": 0, "block_size": 16,
        "block_bytes": 262144, "input_length": 16 * len(ids), "output_length": 0, "hash_ids": ids,
        "found": 0, "extra": "ignored",
    } | fields)  # fmt: skip


def recording(*lines: str, lost: int = 0) -> list[str]:
    end = {"end": True, "requests": len(lines), "lost": lost}
    return ['{"kvferry_trace": 1, "server": "x"}', *lines, json.dumps(end)]


def burst(*rows: tuple[float, str, int, int]) -> list[str]:
    """Of time, session, prompt and answer."""
    return [BURST_NAMES] + [
        f"{at},{session},3,GPT-4,{prompt},{answer},{prompt + answer},Conversation log"
        for at, session, prompt, answer in rows
    ]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path
