"""Two sizes of every engine benchmark, and the conditions under which each can run.

`laptop` runs here: a model made on the spot, with prompts and counts that two cores compute in
minutes. `paper` has the source's models and numbers, for a GPU host with the weights on its disk.
Each number is a flag; a number not given is the preset's.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.engine.kinds import VLLM, named
from benchmarks.engine.prompts import check_length
from benchmarks.harness import options
from benchmarks.harness.machine import num_gpus
from benchmarks.remote_kv_cache.work.models import MODELS, Model
from examples import tiny_model
from remote_server.errors import ConfigError
from remote_server.values import parse_bytes

LAPTOP, PAPER = "laptop", "paper"

SHAPES: Mapping[str, Model] = {
    **{
        name: Model(name, preset.layers, preset.kv_heads, preset.hidden_size // preset.heads)
        for name, preset in tiny_model.PRESETS.items()
    },
    **{f"Qwen/{model.name}": model for model in MODELS if model.name.startswith("Qwen")},
    "meta-llama/Llama-3.1-8B": MODELS[4],
    "THUDM/glm-4-9b-chat-1m": MODELS[3],
}
"""Models by the names that `--model` takes: this repository's, which are built on the spot, and
the source's, by the names under which vLLM finds them."""

SOURCE_RATIOS = "the source's: 12:1 for Qwen2.5-7B, 7:1 for Qwen2.5-3B"
"""Seconds to compute the KV cache of 8,192 tokens to seconds to get it from the server."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Numbers of every engine benchmark; each adds its own. Field names are the source's."""

    model: str
    input_len: int
    num_prompts: int
    max_num_requests: int
    """Requests that the engine computes at a time."""

    max_model_len: int
    block_size: int
    cpu_pool: int | str
    """The source's swap space."""

    memory_space: int | str
    """The server's memory."""

    kv_cache: int | str | None
    """Of the engine's KV cache; None: vLLM's choice."""

    trials: int

    @property
    def shape(self) -> Model:
        """Raises `ConfigError` for a model whose block size is not known here."""
        return shape_of(self.model)

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes(self.block_size)


Some = TypeVar("Some", bound=Numbers)


def shape_of(name: str) -> Model:
    """The shape of the model of this name, or of a directory whose name ends with it."""
    for known, shape in SHAPES.items():
        if name == known or Path(name).name in (shape.name, known):
            return shape
    raise ConfigError(
        f"--model {name}: its shape is not known; known: {', '.join(SHAPES)}, or a directory named "
        "like one of them"
    )


def parser(module: str, question: str, presets: Mapping[str, Numbers]) -> argparse.ArgumentParser:
    """The common flags, `--preset`, `--engine`, and one flag for each of the presets' numbers."""
    made = options.parser(module, question, trials=0, warm_ups=1)
    for action in made._actions:
        if action.dest == "trials":
            action.default = None
            action.help = "timed rounds (default: the preset's)"
    made.add_argument(
        "--preset", choices=sorted(presets), default=LAPTOP,
        help="laptop: a model made on the spot, minutes on two cores; paper: the source's models "
        "and numbers, for a GPU host with the weights (default: %(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--engine",
        type=named,
        default=VLLM,
        metavar="KIND",
        help="vllm; or simulated, which computes nothing and takes as long, with the source's "
        "ratio of computing to fetching, or with a given ratio as in simulated:12 "
        "(default: %(default)s)",
    )
    made.add_argument(
        "--models", type=Path, default=Path(".cache/models"), metavar="DIR",
        help="the folder for models that are made on the spot (default: %(default)s)",
    )  # fmt: skip
    numbers = made.add_argument_group("numbers", "each defaults to the preset's")
    shown = [presets[name] for name in (LAPTOP, PAPER) if name in presets]
    for field in dataclasses.fields(shown[0]):
        if field.name != "trials":
            values = " / ".join(_show(getattr(preset, field.name)) for preset in shown)
            numbers.add_argument(
                f"--{field.name.replace('_', '-')}", type=_reader(field.name, shown[0]),
                metavar="N", help=f"laptop / paper: {values}",
            )  # fmt: skip
    return made


def chosen(arguments: argparse.Namespace, presets: Mapping[str, Some]) -> Some:
    """The preset's numbers, replaced by those that were given."""
    preset = presets[arguments.preset]
    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(preset)
        if getattr(arguments, field.name) is not None
    }
    return dataclasses.replace(preset, **given)


def add_shape(made: argparse.ArgumentParser, default: str) -> None:
    """The flags of a benchmark that has one model, made on the spot: its shape and its folder."""
    made.add_argument("--preset", choices=sorted(tiny_model.PRESETS), default=default)
    made.add_argument("--models", type=Path, default=Path(".cache/models"), metavar="DIR")


def read(
    made: argparse.ArgumentParser,
    argv: Sequence[str],
    presets: Mapping[str, Some],
    check: Callable[[argparse.Namespace, Some], None],
) -> tuple[argparse.Namespace, Some]:
    """The arguments and their numbers. Exits with 2 and the reason when `check` raises
    `ConfigError`."""
    arguments = made.parse_args(argv)
    try:
        numbers = chosen(arguments, presets)
        check(arguments, numbers)
    except ConfigError as error:
        made.exit(2, f"{made.prog.rpartition(' ')[2]}: {error}\n")
    return arguments, numbers


def check_prompts(arguments: argparse.Namespace, numbers: Numbers) -> None:
    """Raise `ConfigError` unless prompts are a token longer than whole blocks, and this machine
    can measure them."""
    check_length(numbers.input_len, numbers.block_size)
    refuse(arguments, numbers)


def refuse(
    arguments: argparse.Namespace,
    numbers: Numbers,
    has_gpu: Callable[[], bool] | None = None,
) -> None:
    """Raise `ConfigError` with the reason when this machine cannot measure these numbers."""
    if arguments.engine != VLLM or numbers.model in tiny_model.PRESETS:
        return
    where = f"--preset {arguments.preset}, --model {numbers.model}"
    if not (has_gpu or gpu_is_here)():
        raise ConfigError(
            f"{where}: no NVIDIA GPU here (libcuda finds no device), and a model of this size "
            f"would need hours on a CPU; --preset {LAPTOP} runs on this machine"
        )
    if not weights_are_here(numbers.model):
        raise ConfigError(
            f"{where}: no weights of it here, and this never downloads any; give "
            "--model the directory that holds them, named like the model"
        )


def gpu_is_here() -> bool:
    """Whether CUDA's driver finds a device."""
    return num_gpus() > 0


def weights_are_here(model: str) -> bool:
    """Whether `model` is a directory with weights, or a name that the local hub cache has."""
    if Path(model).is_dir():
        return any(Path(model).glob("*.safetensors"))
    if model.count("/") != 1 or model.startswith((".", "/")):
        return False  # a path that does not exist
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except ValueError:  # not a valid name in a hub
        return False


def model_path(numbers: Numbers, models: Path) -> str:
    """The model argument for vLLM; a model of this repository is built first."""
    if numbers.model in tiny_model.PRESETS:
        return str(tiny_model.build(models / numbers.model, numbers.model))
    return numbers.model


def _show(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _reader(name: str, preset: Numbers) -> Callable[[str], Any]:
    value = getattr(preset, name)
    if name in ("cpu_pool", "memory_space", "kv_cache"):
        return options.size
    if isinstance(value, tuple):
        kind: Callable[[str], Any] = float if isinstance(value[0], float) else options.positive
        if isinstance(value[0], str):
            kind = str
        return lambda text: tuple(kind(part) for part in text.split(","))
    return options.positive if isinstance(value, int) else str


def size(value: int | str) -> int:
    """`512MiB` or a number, as bytes."""
    return parse_bytes(value)
