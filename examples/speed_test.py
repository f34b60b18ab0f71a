"""A speed test: the time to the first token of a long prompt, computed and repeated.

    python -m examples.make_dummy_inputs --length 100000 --filename dummy.jsonl
    python -m examples.speed_test --url http://127.0.0.1:8000 --filename dummy.jsonl

sends every prompt of the file twice and prints the time to the first token, and the number of
cached tokens if the server reports it. Any text file is also a prompt. With vLLM's `/metrics` and a
kvferry cache server behind it (--cache-server) it also prints the levels of the tokens.

    python -m examples.speed_test --start

needs no running server: it starts a small model, a cache server and an engine, sends each prompt
twice, kills the server, restarts both, and sends it a third time: from the disk.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import table
from examples import make_dummy_inputs, target
from examples.endpoint import EndpointError, FirstToken
from examples.local_stack import Sizes
from examples.make_dummy_inputs import BadInputs, Prompt
from examples.processes import StartFailed
from examples.progress import one_interrupt, step
from examples.target import BadFlags, Target
from examples.token_sources import COMPUTED
from remote_server.errors import KVFerryError

AFTER_RESTART = "after a restart"


@dataclass(frozen=True)
class Asked:
    """A prompt, counted from 1, the occasion of its request, and the answer."""

    prompt: int
    when: str
    answer: FirstToken
    tokens: dict[str, int]  # by level


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. 0; 1 after a failure; 2 for wrong flags; 130 after Ctrl-C, with the
    results until then."""
    given = _parser().parse_args(argv)
    try:
        target.check_flags(given)
        if given.times < 1:
            raise BadFlags(f"--times {given.times}: ask at least once")
        prompts: Sequence[Prompt] = (
            make_dummy_inputs.read(given.filename)
            if given.filename is not None
            else make_dummy_inputs.make_dummy_inputs(1, given.length, seed=given.seed)
        )
    except (BadFlags, BadInputs) as error:
        print(f"speed_test: {error}", file=sys.stderr)
        return 2
    done: list[Asked] = []
    failure, interrupted = "", False
    with one_interrupt():
        try:
            with target.opened(given, Sizes()) as asked:
                _ask_all(asked, prompts, given, done)
        except KeyboardInterrupt:
            interrupted = True
        except (StartFailed, EndpointError, KVFerryError, BadFlags, OSError) as error:
            failure = str(error)
        if done:
            print(f"{text(done)}\n\nnext: {_advice(given, done)}")
    if failure:
        print(f"speed_test: {failure}", file=sys.stderr)
        return 1
    if interrupted:
        print("interrupted; nothing that was started runs any more", file=sys.stderr)
        return 130
    return 0


def _ask_all(
    asked: Target, prompts: Sequence[Prompt], given: argparse.Namespace, done: list[Asked]
) -> None:
    """Answers are added to `done`, also before an error."""
    for time_number in range(1, given.times + 1):
        when = "1st time" if time_number == 1 else "again"
        for number, prompt in enumerate(prompts, 1):
            with step(f"prompt {number} of {len(prompts)}, {when}"):
                done.append(Asked(number, when, *asked.ask(prompt)))
            if asked.stack is None:
                time.sleep(given.pause)
            else:
                asked.stack.settle()
    if asked.stack is not None:
        asked = asked.restarted()
        for number, prompt in enumerate(prompts, 1):
            with step(f"prompt {number} of {len(prompts)}, {AFTER_RESTART}"):
                done.append(Asked(number, AFTER_RESTART, *asked.ask(prompt)))


def text(done: Sequence[Asked]) -> str:
    """A line for each answer, with its time relative to the prompt's first."""
    first: dict[int, float] = {}
    rows: list[list[table.Cell]] = []
    for each in done:
        first.setdefault(each.prompt, each.answer.seconds)
        cached = each.answer.cached_tokens
        rows.append([
            each.prompt, each.when, each.answer.prompt_tokens,
            f"{each.answer.seconds:.3f} s", f"{first[each.prompt] / each.answer.seconds:.1f}x",
            cached, _where(each.tokens),
        ])  # fmt: skip
    headers = ["prompt", "asked", "tokens", "first token", "faster", "cached", "came from"]
    return table.render(headers, rows)


def _where(tokens: dict[str, int]) -> str:
    """`4096 server disk, 13 computed`, the largest count first."""
    most_first = sorted(tokens.items(), key=lambda item: -item[1])
    return ", ".join(f"{count} {level}" for level, count in most_first) or "unknown"


def _advice(given: argparse.Namespace, done: Sequence[Asked]) -> str:
    if given.start:
        return "all levels side by side: python -m examples.stress_test --start"
    told = [each.tokens for each in done if each.tokens]
    if told and COMPUTED in told[0] and len(told[0]) > 1:
        return "the first prompt was known already; for a cold time take another --seed"
    if any(each.answer.cached_tokens is None for each in done):
        return "vLLM reports cached tokens with --enable-prompt-tokens-details"
    return f"all levels side by side: python -m examples.stress_test --url {given.url}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.speed_test",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target.add_flags(parser)
    parser.add_argument("--filename", type=Path, metavar="FILE",
                        help="prompts of make_dummy_inputs, or any text as one prompt (default: "
                        "one prompt of --length)")  # fmt: skip
    parser.add_argument("--length", type=int, default=4096, metavar="TOKENS",
                        help="tokens of a generated prompt (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N",
                        help="seed of the generated prompt (default: %(default)s)")  # fmt: skip
    parser.add_argument("--times", type=int, default=2, metavar="N",
                        help="requests of each prompt (default: %(default)s)")  # fmt: skip
    parser.add_argument("--pause", type=float, default=1.0, metavar="SECONDS",
                        help="with --url: pause after each answer, for pending stores "
                        "(default: %(default)s)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
