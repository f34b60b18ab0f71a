"""Every option of the source document with its default, and ours. Checked when made."""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.storage_workload.driver import GENERATION_S, MAX_WORKERS
from benchmarks.storage_workload.models import MODELS
from remote_server.config import GiB
from remote_server.errors import ConfigError

AUTOSCALER_MODES = ("qos", "capacity")
PROFILES = ("latency", "throughput")
ARRIVALS = ("closed", "fixed", "poisson", "gamma", "trace")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. Building one checks it: raises `ConfigError` naming the setting and its value."""

    # The source's, with its defaults.
    model: str = "llama3.1-8b"
    num_users: int = 100
    duration: float = 60.0
    gpu_mem_gb: float = 16.0
    cpu_mem_gb: float = 32.0
    cache_dir: Path | None = None
    generation_mode: str = "realistic"
    disable_multi_turn: bool = False
    disable_prefix_caching: bool = False
    enable_autoscaling: bool = False
    autoscaler_mode: str = "qos"
    target_saturation: float = 0.8
    enable_rag: bool = False
    rag_num_docs: int = 10
    use_burst_trace: bool = False
    burst_trace_path: Path = Path("BurstGPT/data/BurstGPT_1.csv")
    validation_trace: Path | None = None
    performance_profile: str = "latency"
    output: Path | None = None
    seed: int | None = None
    max_concurrent_allocs: int = 0
    dataset_path: Path | None = None
    max_conversations: int = 500

    # Ours.
    server: str | None = None
    emulated_device: float = 0.0
    mooncake_trace: Path | None = None
    trace_rate: float = 1.0
    arrival: str = "closed"
    request_rate: float = 10.0
    max_requests: int = 0
    storage_capacity_gb: float = 0.0
    no_disk: bool = False
    block_tokens: int = 16
    bytes_scale: float = 1.0
    think_scale: float = 1.0
    scale_interval: float = 10.0
    html: Path | None = None
    plots: Path | None = None
    samples: bool = True

    def __post_init__(self) -> None:
        _one_of("model", self.model, MODELS)
        _one_of("generation_mode", self.generation_mode, GENERATION_S)
        _one_of("autoscaler_mode", self.autoscaler_mode, AUTOSCALER_MODES)
        _one_of("performance_profile", self.performance_profile, PROFILES)
        _one_of("arrival", self.arrival, ARRIVALS)
        _at_least("num_users", self.num_users, 1)
        _at_least("rag_num_docs", self.rag_num_docs, 1)
        _at_least("block_tokens", self.block_tokens, 1)
        _at_least("max_conversations", self.max_conversations, 1)
        for name in (
            "gpu_mem_gb", "cpu_mem_gb", "max_concurrent_allocs", "max_requests",
            "storage_capacity_gb", "think_scale", "emulated_device",
        ):  # fmt: skip
            _at_least(name, getattr(self, name), 0)
        for name in ("duration", "trace_rate", "request_rate", "bytes_scale", "scale_interval"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)} must be greater than 0")
        if not 0 < self.target_saturation <= 1:
            raise ConfigError(
                f"target_saturation: {self.target_saturation} must be above 0 and at most 1"
            )
        self._check_together()

    def _check_together(self) -> None:
        if len(self.traces) > 1:
            raise ConfigError(f"{' and '.join(self.traces)}: one trace at a time")
        if self.arrival == "trace" and not self.traces:
            raise ConfigError("arrival: trace needs a trace to take the times from")
        if self.enable_autoscaling and self.arrival != "closed":
            raise ConfigError(
                f"arrival: {self.arrival} with enable_autoscaling: only users can be added"
            )
        if self.enable_autoscaling and self.traces:
            raise ConfigError(f"{self.traces[0]} with enable_autoscaling: a trace has its own load")
        if self.server is not None and self.cache_dir is not None:
            raise ConfigError("cache_dir with server: the server has a directory of its own")
        if self.server is not None and self.emulated_device:
            raise ConfigError("emulated_device with server: a device instead of all tiers")
        if self.no_disk and not self.cpu_mem_gb:
            raise ConfigError("cpu_mem_gb: 0 with no_disk leaves nowhere to store anything")

    @property
    def traces(self) -> list[str]:
        """The names of the settings that ask for a trace."""
        asked = {
            "use_burst_trace": self.use_burst_trace,
            "dataset_path": self.dataset_path is not None,
            "mooncake_trace": self.mooncake_trace is not None,
        }
        return [name for name, is_asked in asked.items() if is_asked]

    @property
    def memory_bytes(self) -> int:
        return round(self.cpu_mem_gb * GiB)

    @property
    def max_workers(self) -> int:
        return min(self.num_users, MAX_WORKERS) if not self.enable_autoscaling else MAX_WORKERS

    def arguments(self) -> list[str]:
        """The command line of this run, without what has its default."""
        words: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            flag = "--" + field.name.replace("_", "-")
            if field.name == "samples":
                words += [] if value else ["--no-samples"]
            elif value != field.default:
                words += [flag] if value is True else [flag, _word(value)]
        return words


def parser() -> argparse.ArgumentParser:
    """All options; a scenario replaces defaults, and what is on the command line replaces both."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.storage_workload",
        description="How many users can this machine serve, and where is the bottleneck?",
        epilog="`python -m benchmarks.storage_workload suite --help` runs many of them.",
        argument_default=argparse.SUPPRESS,
    )
    made.add_argument("--scenario", metavar="NAME", help="quick, storage-only, production, "
                      "max-users, peak, rag, submission-8b, submission-70b")  # fmt: skip
    load = made.add_argument_group("load")
    load.add_argument("--model", metavar="MODEL", help=", ".join(MODELS))
    load.add_argument("--num-users", type=int, metavar="N")
    load.add_argument("--duration", type=float, metavar="SECONDS")
    load.add_argument("--generation-mode", metavar="MODE", help="none, fast (2 ms a token), "
                      "realistic (30 ms)")  # fmt: skip
    load.add_argument("--seed", type=int, metavar="N", help="the same requests again")
    load.add_argument("--max-concurrent-allocs", type=int, metavar="N",
                      help="writes at a time; 0 is without limit")  # fmt: skip
    load.add_argument("--disable-multi-turn", action="store_true")
    load.add_argument("--disable-prefix-caching", action="store_true")
    load.add_argument("--enable-rag", action="store_true")
    load.add_argument("--rag-num-docs", type=int, metavar="N")
    load.add_argument("--arrival", metavar="KIND", help="closed: a user waits for its answer; "
                      "fixed, poisson, gamma: at --request-rate; trace: at its times")  # fmt: skip
    load.add_argument("--request-rate", type=float, metavar="PER_SECOND")
    load.add_argument("--max-requests", type=int, metavar="N", help="of each user; 0: no limit")
    load.add_argument("--think-scale", type=float, metavar="X", help="0: users do not think")
    tiers = made.add_argument_group("tiers")
    tiers.add_argument("--gpu-mem-gb", type=float, metavar="N", help="0 or no GPU: no such tier")
    tiers.add_argument("--cpu-mem-gb", type=float, metavar="N", help="0: no memory tier")
    tiers.add_argument("--cache-dir", type=Path, metavar="PATH", help="where the disk tier makes a "
                       "directory of its own, removed at the end")  # fmt: skip
    tiers.add_argument("--storage-capacity-gb", type=float, metavar="N",
                       help="of the disk tier; 0: a quarter of what is free there")  # fmt: skip
    tiers.add_argument("--no-disk", action="store_true", help="memory alone")
    tiers.add_argument("--server", metavar="ENDPOINT", help="a running server instead of a store "
                       "in this process, as tcp://127.0.0.1:5757")  # fmt: skip
    tiers.add_argument("--emulated-device", type=float, metavar="GB_PER_S", help="no store: a "
                       "device of this speed that keeps all, to try the autoscalers")  # fmt: skip
    tiers.add_argument("--block-tokens", type=int, metavar="N", help="tokens of a block")
    tiers.add_argument("--bytes-scale", type=float, metavar="X", help="blocks of X times their "
                       "size: the same requests on a small machine")  # fmt: skip
    scaling = made.add_argument_group("autoscaling")
    scaling.add_argument("--enable-autoscaling", action="store_true")
    scaling.add_argument("--autoscaler-mode", metavar="MODE", help="qos: most users within their "
                         "targets; capacity: most bytes per second")  # fmt: skip
    scaling.add_argument("--target-saturation", type=float, metavar="N")
    scaling.add_argument("--scale-interval", type=float, metavar="SECONDS")
    traces = made.add_argument_group("traces")
    traces.add_argument("--use-burst-trace", action="store_true")
    traces.add_argument("--burst-trace-path", type=Path, metavar="PATH", help="BurstGPT, CSV")
    traces.add_argument("--dataset-path", type=Path, metavar="PATH", help="ShareGPT, JSON")
    traces.add_argument("--max-conversations", type=int, metavar="N")
    traces.add_argument("--mooncake-trace", type=Path, metavar="PATH", help="Mooncake, JSONL")
    traces.add_argument("--trace-rate", type=float, metavar="X", help="X times as fast")
    traces.add_argument("--validation-trace", type=Path, metavar="PATH",
                        help="a recorded trace to compare this run with")  # fmt: skip
    results = made.add_argument_group("results")
    results.add_argument("--performance-profile", metavar="PROFILE", help="latency, throughput")
    results.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    results.add_argument("--html", type=Path, metavar="FILE", help="one self-contained page")
    results.add_argument("--plots", type=Path, metavar="FOLDER", help="SVG files")
    results.add_argument("--no-samples", dest="samples", action="store_false",
                         help="leave the raw samples out of the JSON")  # fmt: skip
    return made


def parse(argv: Sequence[str], scenarios: Mapping[str, Mapping[str, Any]]) -> Options:
    """Raises `ConfigError`; argparse exits by itself with 2 for what it does not know."""
    given = vars(parser().parse_args(argv))
    name = given.pop("scenario", None)
    if name is not None:
        _one_of("scenario", name, scenarios)
        given = {**scenarios[name], **given}
    return Options(**given)


def default_output() -> Path:
    return Path(time.strftime("benchmark_results_%Y%m%d_%H%M%S.json"))


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _one_of(setting: str, value: str, allowed: Mapping[str, Any] | Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{setting}: {value!r} is none of {', '.join(allowed)}")


def _at_least(setting: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{setting}: {value} is less than {least}")
