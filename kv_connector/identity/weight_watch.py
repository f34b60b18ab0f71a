"""Watch on the weights of a running engine: samples of their parameters.

vLLM can change weights while it runs: `reload_weights`, weight transfers of a trainer, a worker
extension. None of them notifies a connector. So each worker takes a sample once a second, in a
step of the engine, and whenever the scheduler requests one.

A sample is 8 windows of 32 bytes of each parameter, at positions chosen by its name; a shorter
parameter is read whole. On a GPU the windows are gathered and copied into page-locked memory after
the step's work, and read in a later step, once an event shows that the copy is done: no step waits.
"""

import hashlib
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvferry")

WINDOWS = 8
WINDOW_BYTES = 32
WHOLE_BYTES = WINDOWS * WINDOW_BYTES
"""Bytes of one parameter in a sample."""

PERIOD_S = 1.0

Models = Callable[[], Iterable[torch.nn.Module]]


def models_of_caller() -> Models | None:
    """The models of the model runner on the call stack; None without one.

    vLLM passes no model to a connector. It calls `register_kv_caches` from a method of its runner,
    whose model may be replaced later. The runner is not kept alive.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if callable(getattr(type(caller), "get_model", None)):
            return _models_of(weakref.ref(caller))
        frame = frame.f_back
    return None


def _models_of(runner: "weakref.ref[Any]") -> Models:
    def models() -> Iterator[torch.nn.Module]:
        owner = runner()
        if owner is not None:
            yield owner.get_model()
            for drafter in ("drafter", "speculator"):
                draft = getattr(getattr(owner, drafter, None), "model", None)
                if isinstance(draft, torch.nn.Module):
                    yield draft

    return models


def why_not_watched(config: "VllmConfig") -> str | None:
    """Why this worker's parameters change while the model stays the same; None if they do not."""
    offload = config.offload_config
    if offload.offload_backend == "prefetch" or offload.prefetch.offload_group_size > 0:
        return "weights are copied from the host layer by layer"
    if config.parallel_config.enable_eplb:
        return "experts move between workers"
    return None


class _Staging:
    """Memory for the windows of one device's parameters: `there` to gather, `here` to read."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.here = self.there
        if device.type != "cpu":
            self.here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def begin(self, wide: list[torch.Tensor], short: list[torch.Tensor]) -> Any:
        """Gather and copy. Returns the event after which `here` holds the sample, None on a CPU."""
        split = len(wide) * WHOLE_BYTES
        if wide:
            torch.cat(wide, out=self.there[:split].view(-1, WINDOW_BYTES))
        if short:
            torch.cat(short, out=self.there[split:])
        if self.here is self.there:
            return None
        self.here.copy_(self.there, non_blocking=True)
        event = torch.get_device_module(self.there.device).Event()
        event.record()
        return event


class WeightSampler:
    """Samples of the models' present parameters; at most one is under way.

    It keeps no parameter alive: the memory of a replaced one is freed at once.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._places: dict[str, _Place] = {}
        self._layout = b""
        self._staging: dict[torch.device, _Staging] = {}
        self._events: list[Any] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Sample the parameters as they are after the work submitted so far. Raises `ValueError`
        where none can be read."""
        # vLLM's classes of parameters intercept each access to a tensor, in Python: twice the time.
        with torch._C.DisableTorchFunctionSubclass():
            self._gather()

    def _gather(self) -> None:
        layout, places = hashlib.blake2b(digest_size=16), dict[str, _Place]()
        found: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for model in self._models():
            for name, tensor in model.named_parameters():
                if not _readable(tensor):
                    continue
                place = self._places.get(name)
                if place is None or not place.fits(tensor):
                    place = _Place(name, tensor)
                places[name] = place
                layout.update(place.described)
                wide_and_short = found.setdefault(tensor.device, ([], []))
                wide_and_short[place.is_short].append(place.view(tensor))
        if not found:
            raise ValueError("the model has no parameter that can be read")
        self._places, self._layout = places, layout.digest()
        for device, views in found.items():
            num_bytes = sum(view.numel() for part in views for view in part)
            staging = self._staging.get(device)
            if staging is None or staging.here.numel() != num_bytes:
                self._staging[device] = _Staging(device, num_bytes)
        self._staging = {device: self._staging[device] for device in found}
        begun = [self._staging[device].begin(*views) for device, views in found.items()]
        self._events = [event for event in begun if event is not None]

    @property
    def done(self) -> bool:
        """Whether the last sample can be read. Never waits."""
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        """Block until the sample can be read. Not for use within a step."""
        for event in self._events:
            event.synchronize()

    def digest(self) -> str:
        """A digest of the last sample, which must be done, and of the parameters' names, shapes
        and types."""
        digest = hashlib.blake2b(self._layout, digest_size=16)
        for staging in self._staging.values():
            digest.update(staging.here.numpy())
        return digest.hexdigest()


def _readable(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are in memory of its own. False for a packed kernel format and
    for a parameter without memory."""
    try:
        return not tensor.is_meta and tensor.untyped_storage().nbytes() > 0
    except (RuntimeError, NotImplementedError):
        return False


class _Place:
    """Positions of the windows in a parameter's memory: one in each equal part from its first
    element to its last, or all of a short one. Holds no reference to that memory."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._geometry = _geometry(tensor)
        self.described = f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode()
        item = tensor.element_size()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        start = tensor.storage_offset() * item
        length = (sum((size - 1) * step for size, step in steps) + 1) * item
        length = min(length, tensor.untyped_storage().nbytes() - start)
        self.is_short = length < WHOLE_BYTES
        part = length // WINDOWS
        if not self.is_short:
            chosen = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
            start += chosen % (part - WINDOW_BYTES + 1) // 16 * 16
        self._start = start
        self._size = (length,) if self.is_short else (WINDOWS, WINDOW_BYTES)
        self._steps = (1,) if self.is_short else (part, 1)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether these positions are right for a tensor of the same name."""
        return self._geometry == _geometry(tensor)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The windows, as bytes in place."""
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return memory.set_(tensor.untyped_storage(), self._start, self._size, self._steps)


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


class Known(NamedTuple):
    """A sample that has been read."""

    digest: str
    sample_request: int
    """The number of the scheduler's request for which it was taken."""


class WeightWatch:
    """A worker's samples: their schedule and the last one. The constructor waits for the first."""

    def __init__(self, models: Models, clock: Callable[[], float] = time.monotonic) -> None:
        self._sampler = WeightSampler(models)
        self._clock = clock
        self._sampler.begin()
        self._sampler.wait()
        self.at_start = self._sampler.digest()
        """The digest at the worker's start."""
        self._next_s = clock() + PERIOD_S
        self._sample_request = 0
        """The scheduler's request for which the sample under way, or the last one, is taken."""
        self._under_way = False

    def step(self, sample_request: int | None) -> Known | None:
        """Call once in a step, after its work is submitted. Returns a sample that was completed.

        `sample_request` is the number of the scheduler's newest request, which grows when a sample
        is due at once. With None the weights must not be read in this step: the engine may be
        asleep.
        """
        known = self._completed()
        if sample_request is None or self._under_way:
            return known
        now_s = self._clock()
        if sample_request == self._sample_request and now_s < self._next_s:
            return known
        self._sampler.begin()
        self._sample_request, self._next_s, self._under_way = sample_request, now_s + PERIOD_S, True
        return self._completed() or known  # on a CPU it is done at once

    def _completed(self) -> Known | None:
        if not self._under_way or not self._sampler.done:
            return None
        self._under_way = False
        return Known(self._sampler.digest(), self._sample_request)


def watch_of_caller(config: "VllmConfig") -> WeightWatch | None:
    """A watch on the models of the model runner on the call stack; None, with a warning, where
    changes cannot be detected."""
    models = models_of_caller()
    why_not = why_not_watched(config) if models else "no model runner was found"
    if models is None or why_not is not None:
        logger.warning(
            "changes of the weights are not detected, because %s: after every change reset the "
            "cache with reset_external=true",
            why_not,
        )
        return None
    return WeightWatch(models)
