"""The options of the source document with their defaults, and ours. Checked on creation."""

import difflib
import importlib.util
import itertools
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.harness.files import why_not_into, why_not_written
from benchmarks.storage_workload.load.driver import GENERATION_S, MAX_WORKERS
from benchmarks.storage_workload.traffic.models import MODELS
from remote_server.errors import ConfigError
from remote_server.values import GiB

AUTOSCALER_MODES = ("qos", "capacity")
PROFILES = ("latency", "throughput")

SUBMISSION_S = 600.0
"""The duration that the source requires of a submission."""
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
    cascade: bool = False
    precondition: bool = False
    block_tokens: int = 16
    bytes_scale: float = 1.0
    think_scale: float = 1.0
    scale_interval: float = 10.0
    html: Path | None = None
    plots: Path | None = None
    samples: bool = True

    def __post_init__(self) -> None:
        one_of("model", self.model, MODELS)
        one_of("generation_mode", self.generation_mode, GENERATION_S)
        one_of("autoscaler_mode", self.autoscaler_mode, AUTOSCALER_MODES)
        one_of("performance_profile", self.performance_profile, PROFILES)
        one_of("arrival", self.arrival, ARRIVALS)
        for name in ("num_users", "rag_num_docs", "block_tokens", "max_conversations"):
            _at_least(name, getattr(self, name), 1)
        for name in (
            "gpu_mem_gb", "cpu_mem_gb", "max_concurrent_allocs", "max_requests",
            "storage_capacity_gb", "think_scale", "emulated_device",
        ):  # fmt: skip
            _at_least(name, getattr(self, name), 0)
        if self.seed is not None:
            _at_least("seed", self.seed, 0)
        for name in ("duration", "trace_rate", "request_rate", "bytes_scale", "scale_interval"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}: {value} must be greater than 0, and finite")
        if not 0 < self.target_saturation <= 1:
            raise ConfigError(
                f"target_saturation: {self.target_saturation} must be above 0 and at most 1"
            )
        self._check_together()
        self._check_folders()

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
        if self.no_disk and not self.cpu_mem_gb and not self.gpu_mem_gb:
            raise ConfigError("cpu_mem_gb: 0 with no_disk leaves nowhere to store anything")
        if self.cascade and (self.no_disk or not self.cpu_mem_gb):
            raise ConfigError("cascade: needs memory above a disk")
        if self.enable_rag and self.traces:
            raise ConfigError(f"enable_rag with {self.traces[0]}: a trace brings no documents")
        at_rate, as_recorded = "an arrival of fixed, poisson or gamma", "an arrival of trace"
        of_users = "requests of our own: a trace has its own"
        pausing = self.arrival == "closed" and not self.traces
        for name, needs, is_there in (
            ("disable_multi_turn", of_users, not self.traces),
            ("disable_prefix_caching", of_users, not self.traces),
            ("think_scale", "users who pause: an arrival of closed, and no trace", pausing),
            (
                "max_requests",
                "users: an arrival of a trace has none",
                not (self.traces and self.arrival != "closed"),
            ),
            (
                "block_tokens",
                "blocks of our own: those of a Mooncake trace have 512",
                self.mooncake_trace is None,
            ),
            ("storage_capacity_gb", "a store in this process", self.server is None),
            ("no_disk", "a store in this process", self.server is None),
            ("cascade", "a store in this process", self.server is None),
            (
                "precondition",
                "a disk of a store in this process",
                self.server is None and not self.no_disk and not self.emulated_device,
            ),
            ("request_rate", at_rate, self.arrival not in ("closed", "trace")),
            ("trace_rate", as_recorded, self.arrival == "trace"),
            ("burst_trace_path", "use_burst_trace", self.use_burst_trace),
            ("max_conversations", "dataset_path", self.dataset_path is not None),
            ("rag_num_docs", "enable_rag", self.enable_rag),
            ("autoscaler_mode", "enable_autoscaling", self.enable_autoscaling),
            ("target_saturation", "enable_autoscaling", self.enable_autoscaling),
            ("scale_interval", "enable_autoscaling", self.enable_autoscaling),
        ):
            value = getattr(self, name)
            if value != DEFAULTS[name] and not is_there:
                raise ConfigError(f"{name}: {_word(value)} changes nothing without {needs}")

    def _check_folders(self) -> None:
        """Checked first, so that a run of ten minutes does not end without its result."""
        if self.cache_dir is not None:
            _writable("cache_dir", self.cache_dir)
        for name in ("output", "html"):
            file = getattr(self, name)
            if file is not None and (why := why_not_written(file)):
                raise ConfigError(f"{name}: {why}")
        drawn = [name for name in ("html", "plots") if getattr(self, name) is not None]
        if drawn and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(f"{drawn[0]}: charts need matplotlib, which is not installed")
        if self.plots is not None:  # it is made, with its parents
            above = (self.plots, *self.plots.absolute().parents)
            _writable("plots", next(folder for folder in above if folder.exists()))

    @property
    def traces(self) -> list[str]:
        """The names of the settings that name a trace."""
        asked = {
            "use_burst_trace": self.use_burst_trace,
            "dataset_path": self.dataset_path is not None,
            "mooncake_trace": self.mooncake_trace is not None,
        }
        return [name for name, is_asked in asked.items() if is_asked]

    @property
    def label(self) -> str:
        """Why the figures are not those of the model or of a submission; empty for an ordinary
        run. It is shown beside every verdict."""
        said = []
        if self.emulated_device:
            said.append(f"EMULATED: a device of {self.emulated_device:g} GB/s, and no storage")
        if self.bytes_scale != 1:
            said.append(f"SCALED: blocks of {self.bytes_scale:g} times their size")
        if self.performance_profile == "throughput":
            said.append("NO MLPERF SUBMISSION: its load on this project's own store")
            if self.duration < SUBMISSION_S:
                said.append(f"{self.duration:g} s in place of {SUBMISSION_S:g}")
        return "; ".join(said)

    @property
    def memory_bytes(self) -> int:
        return round(self.cpu_mem_gb * GiB)

    @property
    def max_workers(self) -> int:
        return min(self.num_users, MAX_WORKERS) if not self.enable_autoscaling else MAX_WORKERS

    def arguments(self) -> list[str]:
        """The command line of this run, without options at their default."""
        words: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            flag = "--" + field.name.replace("_", "-")
            if field.name == "samples":
                words += [] if value else ["--no-samples"]
            elif value != DEFAULTS[field.name]:
                words += [flag] if value is True else [flag, _word(value)]
        return words


DEFAULTS = {field.name: field.default for field in fields(Options)}


def default_output() -> Path:
    """A file of this run, created now, because another run may end in the same second."""
    stem = time.strftime("benchmark_results_%Y%m%d_%H%M%S")
    for number in itertools.count(1):
        path = Path(f"{stem}.json" if number == 1 else f"{stem}_{number}.json")
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            break
    return path


def one_of(setting: str, value: str, allowed: Iterable[str]) -> None:
    """Raises `ConfigError` with all known names, and the closest one."""
    names = [*allowed]
    if value not in names:
        meant = difflib.get_close_matches(value, names, 1)
        raise ConfigError(
            f"{setting}: {value!r} is none of {', '.join(names)}"
            + (f"; did you mean {meant[0]}?" if meant else "")
        )


def _at_least(setting: str, value: float, least: float) -> None:
    if not math.isfinite(value):
        raise ConfigError(f"{setting}: {value} is not a finite number")
    if value < least:
        raise ConfigError(f"{setting}: {_word(value)} is less than {least}")


def _writable(setting: str, folder: Path) -> None:
    if why := why_not_into(folder):
        raise ConfigError(f"{setting}: {why}")


def _word(value: object) -> str:
    """The value as typed, with all digits."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
