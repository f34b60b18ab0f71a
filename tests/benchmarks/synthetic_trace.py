"""A trace in the published format, made up: conversations that grow, and prompts asked once."""

import gzip
import json
import random
from pathlib import Path

TOKENS = 512


def lines(requests: int, seed: int = 1, conversations: int = 24) -> list[str]:
    """Every prompt begins with block 0, as if all had one system prompt; a third are asked once."""
    chance = random.Random(seed)
    upcoming = 1
    histories: list[list[int]] = [[0] for _ in range(conversations)]
    made = []
    for number in range(requests):
        once = chance.random() < 1 / 3
        place = min(int(chance.expovariate(0.15)), conversations - 1)
        history = [0] if once else histories[place]
        grown = chance.randint(1, 4)
        history = [*history, *range(upcoming, upcoming + grown)]
        upcoming += grown
        if not once:
            histories[place] = history if len(history) < 24 else [0]
        full = chance.random() < 0.5
        last = [] if full else [upcoming]  # of a block that is not full
        upcoming += not full
        tokens = len(history) * TOKENS + (0 if full else chance.randint(1, TOKENS - 1))
        made.append(json.dumps({
            "timestamp": number // 3 * 3000, "input_length": tokens, "output_length": 10,
            "hash_ids": history + last,
        }))  # fmt: skip
    return made


def write(path: Path, requests: int = 300, seed: int = 1) -> Path:
    """At `path`, gzipped when its name ends in `.gz`."""
    text = "\n".join(lines(requests, seed)) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
