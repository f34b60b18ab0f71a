"""The command line: a flag for each option, and the scenarios that set many of them."""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args

from benchmarks.harness.options import above_zero
from benchmarks.storage_workload.plan.options import DEFAULTS, Options, one_of
from benchmarks.storage_workload.plan.scenarios import SCENARIOS
from benchmarks.storage_workload.traffic.models import MODELS
from remote_server.errors import ConfigError

_GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "load": {
        "model": ("MODEL", ", ".join(MODELS)),
        "num_users": ("N", "users that send requests and wait for the answers"),
        "duration": ("SECONDS", "length of the measurement"),
        "generation_mode": ("MODE", "none, fast (2 ms a token), realistic (30 ms)"),
        "seed": ("N", "repeat the requests of this seed; without one it is drawn, and printed"),
        "max_concurrent_allocs": ("N", "writes at a time; 0 is without limit"),
        "disable_multi_turn": ("", "each request is a conversation of its own"),
        "disable_prefix_caching": ("", "no system prompts that users share"),
        "enable_rag": ("", "one request of ten brings parts of documents"),
        "rag_num_docs": ("N", "documents, stored before users come"),
        "arrival": ("KIND", "closed: users wait for answers; fixed, poisson, gamma: at "
                    "--request-rate; trace: at its times"),
        "request_rate": ("PER_SECOND", "the rate of open arrivals"),
        "max_requests": ("N", "requests of each user; 0 is without limit"),
        "think_scale": ("X", "factor on the users' pauses; 0: none"),
    },
    "tiers": {
        "gpu_mem_gb": ("N", "GiB; 0 or no GPU: no such tier"),
        "cpu_mem_gb": ("N", "GiB; 0: no memory tier"),
        "cache_dir": ("PATH", "the disk tier makes its own directory there, removed at the "
                      "end (default: the system's temporary directory)"),
        "storage_capacity_gb": ("N", "GiB of the disk tier; 0: a quarter of the free space"),
        "no_disk": ("", "memory alone"),
        "cascade": ("", "the source's waterfall: blocks are written to disk when they leave "
                    "memory, not behind their put"),
        "precondition": ("", "write the whole disk tier once before the measurement, with blocks "
                         "that no request names"),
        "server": ("ENDPOINT", "a running server instead of a store in this process, as "
                   "tcp://127.0.0.1:5757, with ?keys=FILE where it requires keys"),
        "emulated_device": ("GB_PER_S", "no store: a device of this speed that keeps all, to test "
                            "the autoscalers; 0: the store"),
        "block_tokens": ("N", "tokens of a block"),
        "bytes_scale": ("X", "scale the size of blocks by X: the same requests on a small machine"),
    },
    "autoscaling": {
        "enable_autoscaling": ("", "change the number of users until the right one is found"),
        "autoscaler_mode": ("MODE", "qos: most users within their targets; capacity: most bytes "
                            "per second"),
        "target_saturation": ("N", "for qos: the worst class's P95 in units of its target"),
        "scale_interval": ("SECONDS", "interval of the decisions"),
    },
    "traces": {
        "use_burst_trace": ("", "the requests of a BurstGPT trace"),
        "burst_trace_path": ("PATH", "the file of that trace, CSV"),
        "dataset_path": ("PATH", "the conversations of a ShareGPT file, JSON"),
        "max_conversations": ("N", "conversations of that file, at most"),
        "mooncake_trace": ("PATH", "the requests of a Mooncake trace, JSON lines"),
        "trace_rate": ("X", "with --arrival trace: speed factor"),
        "validation_trace": ("PATH", "a recorded trace to compare this run with, JSON"),
    },
    "results": {
        "performance_profile": ("PROFILE", "latency: limits of the source; throughput: that "
                                "anything was generated"),
        "output": ("FILE", "JSON (default: benchmark_results_DATE_TIME.json)"),
        "html": ("FILE", "one self-contained page"),
        "plots": ("FOLDER", "charts, each as SVG and as PNG"),
        "samples": ("", "leave the raw samples out of the JSON"),
    },
}  # fmt: skip


_COMMANDS = ("suite", "validate", "report")

_SCALED = ("bytes_scale", "gpu_mem_gb", "cpu_mem_gb", "storage_capacity_gb")


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, as a `ConfigError`, without a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> argparse.ArgumentParser:
    """All options. A scenario overrides defaults; the command line overrides both."""
    made = OneLineParser(
        prog="python -m benchmarks.storage_workload",
        description="How many users can this machine serve, and where is the bottleneck?",
        epilog="`… suite --help` runs many of these; `… validate --help` runs one several times; "
        "`… report --help` shows one again.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    made.add_argument("--scenario", metavar="NAME", help=", ".join(SCENARIOS))
    made.add_argument("--scale", type=above_zero, metavar="X",
                      help="scale blocks and tiers by X unless the command line sets them: the "
                      "scenario on a smaller machine, with a label")  # fmt: skip
    by_name = {field.name: field for field in fields(Options)}
    for title, options in _GROUPS.items():
        group = made.add_argument_group(title)
        for name, (metavar, text) in options.items():
            field = by_name[name]
            if name == "samples":
                group.add_argument("--no-samples", dest=name, action="store_false", help=text)
            elif field.type is bool:
                group.add_argument(_flag(name), action="store_true", help=text)
            else:
                group.add_argument(
                    _flag(name), type=_type_of(field), metavar=metavar, help=text + _default(field)
                )
    return made


def parse(argv: Sequence[str]) -> Options:
    """Raises `ConfigError`; with `--help` it prints and exits."""
    known = parser()
    found, unknown = known.parse_known_args(argv)
    if unknown:
        flags = [flag for action in known._actions for flag in action.option_strings]
        words = {**dict.fromkeys((*flags, *_COMMANDS)), **dict.fromkeys(SCENARIOS, "--scenario ")}
        meant = difflib.get_close_matches(unknown[0].partition("=")[0], words, 1)
        raise ConfigError(
            f"there is no option {unknown[0]}"
            + (f"; did you mean {words[meant[0]] or ''}{meant[0]}?" if meant else "")
        )
    given = vars(found)
    name, scale, named = given.pop("scenario", None), given.pop("scale", None), {*given}
    if name is not None:
        one_of("scenario", name, SCENARIOS)
        given = {**SCENARIOS[name], **given}
    if scale is not None:
        given |= {
            field: scale * given.get(field, DEFAULTS[field])
            for field in _SCALED if field not in named
        }  # fmt: skip
    return Options(**given)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _type_of(field: "Field[Any]") -> type:
    """The type of a field; int for an optional one."""
    kinds = [kind for kind in get_args(field.type) if kind is not NoneType] or [field.type]
    kind = kinds[0]
    assert isinstance(kind, type)
    return kind


def _default(field: "Field[Any]") -> str:
    if field.default is None:
        return ""
    shown = field.default if isinstance(field.default, (str, Path)) else f"{field.default:g}"
    return f" (default: {shown})"
