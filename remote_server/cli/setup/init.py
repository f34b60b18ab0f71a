"""`kvferry init`: the files to run servers and engines, from five answers."""

import argparse
import os
import secrets
import sys
from pathlib import Path

from remote_server.cli.exit_status import YES
from remote_server.cli.output import print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.setup.init_answers import (
    CPU,
    GPU,
    KUBERNETES,
    SYSTEMD,
    Answers,
    answers_of,
    check_path,
)
from remote_server.cli.setup.init_files import COMMAND as VLLM
from remote_server.cli.setup.init_files import KEYS, SETTINGS, STEPS, TOKEN, rendered, summary
from remote_server.errors import ConfigError
from remote_server.keys import make_keys, write_new
from remote_server.values import format_bytes


def add_flags(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", default=Path("kvferry"), metavar="DIR",
                        help="where the files go (default: %(default)s)")  # fmt: skip
    parser.add_argument("--model", metavar="NAME", help="the model, as vLLM serves it")
    parser.add_argument("--device", metavar=f"{{{GPU},{CPU}}}", help="what engines run on "
                        "(default: as this host)")  # fmt: skip
    parser.add_argument("--for", dest="target", choices=(SYSTEMD, KUBERNETES), default=SYSTEMD,
                        help="what starts the servers (default: %(default)s)")  # fmt: skip
    parser.add_argument("--hosts", metavar="HOSTS",
                        help="hosts of the cache servers, with commas between them; on Kubernetes "
                        "their number; 1: beside the engine (default: 1)")  # fmt: skip
    parser.add_argument("--memory", metavar="SIZE",
                        help="of each server (default: a quarter of this host's)")  # fmt: skip
    parser.add_argument("--cpu-pool", metavar="SIZE",
                        help="of each engine (default: an eighth of this host's)")  # fmt: skip
    parser.add_argument("--disk", metavar="DIR", help="for blocks beyond memory (default: none)")
    parser.add_argument("--disk-bytes", default="64GiB", metavar="SIZE",
                        help="on each disk (default: %(default)s)")  # fmt: skip
    parser.add_argument("--bucket", metavar="URL", help="that servers share (default: none)")
    parser.add_argument("--keys", metavar="TENANTS",
                        help="tenants with a key each, commas between them (default: none; "
                        "`engines` where other machines reach the servers)")  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="take defaults, skip the questions")


def run(flags: argparse.Namespace) -> int:
    folder = Path(os.path.abspath(flags.folder))
    check_path(str(folder), "DIR")
    _check_new(folder, [SETTINGS, VLLM, STEPS, KEYS])  # before anything is asked
    asks = sys.stdin.isatty() and not flags.yes
    answers = answers_of(flags, _ask if asks else None)
    texts = rendered(answers, folder)
    _check_new(folder, [*texts, KEYS])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if answers.tenants:
            _make_keys(folder / KEYS, answers)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
        (folder / VLLM).chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from error
    print_lines(*summary(answers, texts, folder))
    return YES


def _ask(question: str, default: str) -> str:
    shown = f" [{default}]" if default else ""
    try:
        while not (answer := input(f"{question}{shown}: ").strip() or default):
            pass
        return answer
    except EOFError:
        raise ConfigError("the answers ended; --yes takes the defaults") from None


def _check_new(folder: Path, names: list[str]) -> None:
    """Raise `ConfigError` when one of the files exists: nothing is written then."""
    there = [name for name in names if os.path.lexists(folder / name)]
    if there:
        raise ConfigError(f"{folder} has {', '.join(there)}, and nothing is overwritten: choose "
                          "another folder")  # fmt: skip


def _make_keys(folder: Path, answers: Answers) -> None:
    share = answers.disk_bytes // len(answers.tenants)
    shares = f'disk = "{share}"  # {format_bytes(share)}\n' if answers.disk else ""
    make_keys(folder, answers.tenants, shares=shares)
    if answers.target == KUBERNETES:
        write_new(folder / TOKEN, secrets.token_hex(32) + "\n")


COMMAND = Command(
    add_flags,
    run,
    description="Write settings, a systemd unit or a Kubernetes overlay, keys, and the command "
    "that starts vLLM with the cache. On a terminal it asks for what no flag gives. It overwrites "
    "nothing.",
    examples="""\
kvferry init                                         # questions, then files in ./kvferry
kvferry init /etc/kvferry --model MODEL --memory 64GiB --yes
kvferry init --model MODEL --hosts cache-a,cache-b --disk /nvme/kvferry --keys blue,red
kvferry init --model MODEL --for kubernetes --hosts 4 --bucket s3://kv-cache/prod
""",
)
