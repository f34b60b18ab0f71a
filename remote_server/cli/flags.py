"""Flags that several commands share, and the kinds of their values."""

import argparse

from remote_server.values import finite_number

MOST_SECONDS = 86_400


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """`--timeout-s`."""
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=3.0,
        metavar="SECONDS",
        help="how long to wait for an answer (default: %(default)s)",
    )


def add_json(parser: argparse.ArgumentParser, *, lines: bool = False) -> None:
    """`--json`. `lines`: the command prints an object again and again."""
    text = "one object a line, for scripts" if lines else "one object for scripts"
    parser.add_argument("--json", action="store_true", help=text)


def seconds(text: str) -> float:
    """`text` as a time to wait, above zero and up to a day; for `argparse`."""
    if number := seconds_or_none(text):
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not above zero")


def seconds_or_none(text: str) -> float:
    """`text` as a time of up to a day, which may be zero; for `argparse`."""
    try:
        if 0 <= (number := finite_number(text)) <= MOST_SECONDS:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r:.80} is not a time of up to {MOST_SECONDS} seconds")
