"""A generator of long prompts, equal for equal seeds on every machine.

    python -m examples.make_dummy_inputs --length 4096 --count 3 --shared 1024

writes `dummy.jsonl`: a line for each prompt, `{"prompt": [17, 342, …]}`. A prompt is a document of
exactly `--length` tokens, whole blocks of it, followed by a short question that is the same for
all: a cache can hold the whole document, and an engine always computes the question. The documents
share exactly their first `--shared` tokens, so that a cached one serves exactly that part of the
others.

A prompt consists of token ids from 3 to 511, ordinary tokens of nearly every model. An endpoint
that accepts no token ids needs `--model`: then the prompts are text, written with the tokens of
that model. The engine tokenizes the text again, so its length is approximate.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.tiny_model import SPECIAL_TOKENS, VOCABULARY, prompt_tokens

Prompt = str | list[int]

QUESTION_TOKENS = 13
FIRST, LAST = len(SPECIAL_TOKENS), VOCABULARY - 1
_ORDINARY = LAST - FIRST + 1

_SHARED_SEED, _QUESTION_SEED, _OWN_SEED = 1, 2, 3
_WORD = re.compile(r" [A-Za-z]{2,}")
_SEEDS = 1_000_000  # more seeds, or more documents of one seed, would repeat prompts


class BadInputs(ValueError):
    """The request is impossible, or a file is invalid. One line."""


def make_dummy_inputs(
    count: int,
    length: int,
    *,
    shared: int = 0,
    question: int = QUESTION_TOKENS,
    block_size: int = 32,
    seed: int = 0,
) -> list[list[int]]:
    """`count` prompts of `length` + `question` tokens.

    The first `shared` tokens are equal in all, the next one differs in each; `length` and `shared`
    are whole blocks of `block_size` tokens. A smaller `count` gives the first prompts of a larger
    one. Raises `BadInputs`.
    """
    _check(count, length, shared, question, block_size, seed)
    common = prompt_tokens(shared, _seed(seed, _SHARED_SEED))
    asked = prompt_tokens(question, _seed(seed, _QUESTION_SEED))
    documents = []
    for number in range(count):
        own = prompt_tokens(length - shared, _seed(seed, _OWN_SEED, number))
        if own:
            # Random documents may begin with the same token, and would then share more.
            own[0] = FIRST + (seed + number) % _ORDINARY
        documents.append(common + own)
    return [document + asked for document in documents]


def whole_blocks(tokens: int, block_size: int) -> int:
    """`tokens`, rounded down to whole blocks, but at least one."""
    return max(1, tokens // block_size) * block_size


def write(prompts: Sequence[Prompt], path: Path) -> None:
    """One line of JSON for each prompt."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def read(path: Path) -> list[Prompt]:
    """The prompts of a file that `write` made; of any other file, its whole text as one prompt.

    Raises `BadInputs` with a remedy.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise BadInputs(
            f"{path}: no such file; make one: python -m examples.make_dummy_inputs "
            f"--filename {path}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputs(f"{path}: cannot be read: {error}") from None
    if not text.strip():
        raise BadInputs(f"{path}: empty; a prompt needs at least one token")
    if not text.startswith('{"prompt"'):
        return [text]
    return [_prompt(line, f"{path}, line {n}") for n, line in enumerate(text.splitlines(), 1)]


def _prompt(line: str, where: str) -> Prompt:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise BadInputs(f'{where}: not {{"prompt": …}}; make the file anew') from None
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise BadInputs(f"{where}: the prompt is neither text nor token ids; make the file anew")


def _check(count: int, length: int, shared: int, question: int, block_size: int, seed: int) -> None:
    if block_size < 1:
        raise BadInputs(f"--block-size {block_size}: a block has at least one token")
    if not 0 <= seed < _SEEDS:
        raise BadInputs(f"--seed {seed}: choose one from 0 to {_SEEDS - 1}")
    if question < 1:
        raise BadInputs(f"--question {question}: something must be left to compute; at least 1")
    if not 1 <= count <= _ORDINARY:
        raise BadInputs(f"--count {count}: choose 1 to {_ORDINARY}")
    for flag, tokens in (("--length", length), ("--shared", shared)):
        if tokens % block_size:
            below = tokens // block_size * block_size
            nearest = f"{below} or {below + block_size}" if below > 0 else f"{block_size}"
            raise BadInputs(
                f"{flag} {tokens}: not whole blocks of {block_size} tokens; take {nearest}"
            )
    if length < 1:
        raise BadInputs(f"--length {length}: at least one block, {block_size} tokens")
    if not 0 <= shared <= length:
        raise BadInputs(f"--shared {shared}: choose 0 to --length, {length}")
    if shared == length and count > 1:
        raise BadInputs(
            f"--shared {shared}: all of --length; the prompts would be the same. "
            f"Take {length - block_size} or less, or --count 1"
        )


def _seed(seed: int, kind: int, number: int = 0) -> int:
    return (kind * _SEEDS + seed) * _SEEDS + number


def as_text(prompts: Sequence[list[int]], words: Sequence[str]) -> list[Prompt]:
    """The prompts with a word for each token. Equal tokens are equal words, so the prompts share
    the same parts as text."""
    return ["".join(words[(token - FIRST) % len(words)] for token in prompt) for prompt in prompts]


def words_of(model: str) -> list[str]:
    """Words with a leading blank that are one token each for this model, at most as many as there
    are tokens to replace. `model` is a folder or a name on the model hub.

    Raises `BadInputs` when there is no such tokenizer, or it has no such words.
    """
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
    except ImportError:
        raise BadInputs(
            f"--model {model}: needs the package transformers, which comes with vLLM; without "
            "--model the prompts are token ids and need nothing"
        ) from None
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadInputs(f"--model {model}: no tokenizer there: {reason}") from None
    words: list[str] = []
    for token in range(len(tokenizer)):
        word = tokenizer.decode([token])
        if _WORD.fullmatch(word) and tokenizer.encode(word, add_special_tokens=False) == [token]:
            words.append(word)
            if len(words) == _ORDINARY:
                break
    if len(words) < 2:
        raise BadInputs(f"--model {model}: its tokens are no words; leave --model out")
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file and print a summary of it. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.make_dummy_inputs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", type=int, default=4096, metavar="TOKENS",
                        help="tokens of a document (default: %(default)s)")  # fmt: skip
    parser.add_argument("--count", type=int, default=1, metavar="N",
                        help="number of prompts (default: %(default)s)")  # fmt: skip
    parser.add_argument("--shared", type=int, default=0, metavar="TOKENS",
                        help="common first tokens (default: %(default)s)")  # fmt: skip
    parser.add_argument("--question", type=int, default=QUESTION_TOKENS, metavar="TOKENS",
                        help="tokens of the question (default: %(default)s)")  # fmt: skip
    parser.add_argument("--block-size", type=int, default=32, metavar="TOKENS",
                        help="tokens of an engine's block (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="other seeds give other prompts (default: %(default)s)")  # fmt: skip
    parser.add_argument("--model", metavar="DIR|NAME",
                        help="write text in this model's words instead of token ids")  # fmt: skip
    parser.add_argument("--filename", type=Path, default=Path("dummy.jsonl"), metavar="FILE",
                        help="(default: %(default)s)")  # fmt: skip
    given = parser.parse_args(argv)
    try:
        prompts = make_dummy_inputs(
            given.count, given.length, shared=given.shared, question=given.question,
            block_size=given.block_size, seed=given.seed,
        )  # fmt: skip
        made = as_text(prompts, words_of(given.model)) if given.model else prompts
        write(made, given.filename)
    except (BadInputs, OSError) as error:
        print(f"make_dummy_inputs: {error}", file=sys.stderr)
        return 2
    about = "about " if given.model else ""
    print(
        f"{given.filename}: {given.count} prompts of {about}{given.length} + {given.question} "
        f"tokens, the first {given.shared} the same in all"
    )
    print(f"next: python -m examples.speed_test --url URL --filename {given.filename}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
