"""Transfers: how fast does the KV cache of a real model move, block by block as in its engine?

    python -m benchmarks.kvbench plan --models 70b --config block-tp8-pp2
    python -m benchmarks.kvbench run --models r1,70b,llama-3.1-8b --requests 1,10
    python -m benchmarks.kvbench run --server tcp://127.0.0.1:5757 --ways shm,tcp
    python -m benchmarks.kvbench profile --models 70b

`plan` only computes. `run` moves the planned blocks over every available way. `profile` does so
with several windows, to find the number of blocks needed in flight. The source's tool has
`kvcache` and `io-size` for parts of `plan`, which are the same here; its `profile` is `run` here.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.harness import options
from benchmarks.harness.commands import peer_folder
from benchmarks.harness.printing import tolerate_closed_pipe
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner
from benchmarks.kvbench import configurations, report
from benchmarks.kvbench.configurations import Configuration
from benchmarks.kvbench.making import WAYS
from benchmarks.kvbench.measure import measure
from benchmarks.kvbench.plan import Plan, plan
from benchmarks.kvbench.report import chart
from benchmarks.remote_kv_cache.work.target import Target
from remote_server.allocator import keep_freed_memory
from remote_server.errors import ConfigError
from remote_server.traces import models
from remote_server.values import MiB

MODULE = "benchmarks.kvbench"

OF_THE_SOURCE = (
    "deepseek-r1", "llama-3.1-70b", "llama-3.1-8b", "qwen3-8b", "qwen3-235b-a22b", "gpt-oss-20b",
    "gpt-oss-120b",
)  # fmt: skip
"""The models of the source's tool."""

_SOURCE_MODELS = "deepseek-r1,llama-3.1-70b,llama-3.1-8b"
_WINDOW = 64 * MiB
_PROFILED_WINDOWS = (1, 4, 16, 64, 256)
_RUN, _PROFILE = "run", "profile"
_PLAN_ALIASES = ["kvcache", "io-size", "io_size"]
_SEVERAL_RANKS = "`python -m benchmarks.six_systems --processes N` measures several at once"
_NOT_HERE = {
    "ct-perftest": _SEVERAL_RANKS,
    "sequential-ct-perftest": _SEVERAL_RANKS,
    "nixlbench": f"`{_RUN} --ways nixl,gds` moves blocks with NIXL's backends",
}
"""Commands of the source's tools that are absent here, and their replacements."""

_OVERRIDES = ("tp", "pp", "page_size", "prompt_tokens")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 for an impossible plan; else as in every benchmark."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and (ours := _NOT_HERE.get(argv[0].replace("_", "-"))):
        print(f"kvbench: there is no {argv[0]} here; {ours}", file=sys.stderr)
        return 2
    arguments = _parser().parse_args(argv)
    try:
        plans = _plans(arguments)
        server = Target(getattr(arguments, "server", ()))
    except ConfigError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 2
    if arguments.command not in (_RUN, _PROFILE):
        as_format = {"text": report.plans_as_text, "json": report.plans_as_json,
                     "csv": report.plans_as_csv}  # fmt: skip
        with tolerate_closed_pipe():
            print(as_format[arguments.format](plans))
        return 0
    return _measure(plans, server, arguments, argv)


def _measure(
    plans: Sequence[Plan], server: Target, arguments: argparse.Namespace, argv: Sequence[str]
) -> int:
    keep_freed_memory()  # as every engine with the client does
    record = Record.begin(MODULE, argv)
    record.versions |= peer_folder.versions("nixl")
    total = sum(p.num_bytes for p in plans)
    with Runner(arguments.trials, arguments.warm_ups, total=total) as runner:
        for planned in plans:
            windows = _windows(planned, arguments)
            record.parameters[planned.title] = {
                "block_bytes": planned.block_bytes, "batch": planned.batch,
                "windows": list(windows), **msgspec.structs.asdict(planned.configuration),
            }  # fmt: skip
            measure(
                runner, record, planned, ways=arguments.ways, windows=windows,
                folder=arguments.directory, memory=arguments.memory, check=arguments.check,
                server=server,
            )  # fmt: skip
            if runner.interrupted:
                break
    options.write(record, runner, arguments, chart)
    print(report.plans_as_text(plans))
    print(f"\n{report.measured_as_text(record, plans)}")
    print(
        "\nprepare, post and transfer: microseconds of a whole batch, average and p99 (of fewer "
        "than 100 trials: the slowest)"
    )
    return options.finish(record, runner)


def _windows(planned: Plan, arguments: argparse.Namespace) -> tuple[int, ...]:
    if arguments.command == _RUN:
        return (max(1, arguments.window // planned.block_bytes),)
    useful = [window for window in _PROFILED_WINDOWS if window < planned.batch]
    return (*useful, planned.batch)


def _plans(arguments: argparse.Namespace) -> list[Plan]:
    """Every model with every configuration and number of requests. Raises `ConfigError`."""
    known_models = models.load_models(arguments.models_file)
    known = configurations.load_configurations(arguments.config_file)
    changed = {name: value for name in _OVERRIDES if (value := getattr(arguments, name))}
    if arguments.pattern:
        changed["pattern"] = arguments.pattern
    if arguments.kv_dtype:
        changed["kv_dtype"] = arguments.kv_dtype
    chosen: list[Configuration] = models.choose(arguments.config, known, "config")
    return [
        plan(model, msgspec.structs.replace(configuration, **changed, requests=requests),
             compatible=arguments.compat)
        for model in models.choose(_expand(arguments.models), known_models, "models")
        for configuration in chosen
        for requests in arguments.requests or [configuration.requests]
    ]  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser(
        "plan", aliases=_PLAN_ALIASES, help="bytes per token and block, blocks per transfer"
    )
    _add_plan_options(planning)
    planning.add_argument("--format", choices=("text", "json", "csv"), default="text")
    for name, text in (
        (_RUN, "move the planned blocks over every way, one window"),
        (_PROFILE, "move them with several windows: where the time goes"),
    ):
        common = options.parser(f"{MODULE} {name}", text, trials=10)
        command = commands.add_parser(
            name, help=text, parents=[common], add_help=False, allow_abbrev=False
        )
        _add_plan_options(command)
        command.add_argument(
            "--ways", type=options.names(WAYS), default=WAYS, metavar="NAMES",
            help=f"some of {','.join(WAYS)} (default: all)",
        )  # fmt: skip
        command.add_argument(
            "--directory", type=options.folder, default=".", metavar="DIR",
            help="folder of the files, which are removed (default: this one)",
        )  # fmt: skip
        command.add_argument(
            "--check", action=argparse.BooleanOptionalAction, default=True,
            help="compare every byte after every trial (default: yes)",
        )  # fmt: skip
        options.add_server(command)
        if name == _RUN:
            command.add_argument(
                "--window", type=options.size, default=_WINDOW, metavar="SIZE",
                help="bytes in flight, at least one block (default: 64MiB)",
            )  # fmt: skip
    return parser


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", "--model", default=_SOURCE_MODELS, metavar="NAMES",
        help="parts of names, as in r1,70b; source: all seven of the source's tool "
        "(default: %(default)s)")  # fmt: skip
    add("--models-file", type=Path, default=models.BUILT_IN, metavar="FILE", help="your own models")
    add("--config", default="block-tp1-pp1", metavar="NAMES",
        help="names of configurations (default: %(default)s)")  # fmt: skip
    add("--config-file", type=Path, default=configurations.BUILT_IN, metavar="FILE",
        help="your own configurations")  # fmt: skip
    add("--tp", type=options.positive)
    add("--pp", type=options.positive)
    add("--pattern", choices=("block", "layer"))
    add("--kv-dtype", choices=tuple(models.BYTES_PER_NUMBER))
    add("--page-size", type=options.positive, help="tokens of a block")
    add("--prompt-tokens", type=options.positive)
    add(
        "--requests",
        "--num-requests",
        "--num_requests",
        type=options.several(options.positive),
        metavar="N,N",
        help="prompts in one transfer, as in 1,10",
    )
    add("--compat", action="store_true",
        help="count and round as in the source's tool, errors included")  # fmt: skip


def _expand(names: str) -> str:
    return ",".join(OF_THE_SOURCE) if names == "source" else names


if __name__ == "__main__":
    sys.exit(main())
