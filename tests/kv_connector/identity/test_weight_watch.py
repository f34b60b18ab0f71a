"""A sample sees every parameter change, costs a step no wait, and keeps no parameter alive."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted_client import Clock

from kv_connector.identity import weight_watch
from kv_connector.identity.weight_watch import (
    PERIOD_S,
    WeightSampler,
    WeightWatch,
    models_of_caller,
)


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(*shape).to(dtype), requires_grad=False)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = parameter(300, 200)
        self.bias = parameter(3)
        self.scale = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
        self.turned = torch.nn.Parameter(parameter(64, 96).t(), requires_grad=False)
        self.bytes = torch.nn.Parameter(torch.zeros(5000, dtype=torch.int8), requires_grad=False)
        self.part = torch.nn.Parameter(parameter(10, 500)[3:5], requires_grad=False)
        self.empty = parameter(0)
        self.none = torch.nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)


def digest(*models: torch.nn.Module) -> str:
    sampler = WeightSampler(lambda: models)
    sampler.begin()
    assert sampler.done
    return sampler.digest()


@pytest.mark.parametrize("name", ["wide", "bias", "scale", "turned", "bytes", "part"])
@pytest.mark.parametrize("how", [lambda t: t.add_(1), lambda t: t.mul_(0)])
def test_every_parameter_counts(name: str, how: Callable[[torch.Tensor], Any]):
    model = Model()
    before = digest(model)
    assert digest(model) == before == digest(Model())
    tensor = getattr(model, name).data
    how(tensor)
    if tensor.count_nonzero() or name != "bytes":
        assert digest(model) != before


def test_a_sample_calls_no_code_of_a_parameters_own_class():
    """vLLM's classes intercept each access to a tensor, in Python."""
    calls = []

    class Intercepting(torch.nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, *rest: Any) -> Any:
            calls.append(func)
            return super().__torch_function__(func, *rest)

    model, plain = torch.nn.Module(), torch.nn.Module()
    model.wide = Intercepting(torch.ones(300, 200), requires_grad=False)
    plain.wide = torch.nn.Parameter(torch.ones(300, 200), requires_grad=False)
    calls.clear()
    assert digest(model) == digest(plain)
    assert not calls


def test_the_names_shapes_and_types_of_parameters_count():
    model, other = Model(), Model()
    other.wide = parameter(200, 300)
    assert digest(model) != digest(other)
    other.wide = torch.nn.Parameter(model.wide.view(torch.float16), requires_grad=False)
    assert digest(model) != digest(other)
    other.wide, other.more = parameter(300, 200), parameter(1)
    assert digest(model) != digest(other)


def test_an_update_of_one_weight_in_two_hundred_is_seen():
    """What a trainer's small step leaves of weights that have 8 bits of mantissa."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList([parameter(256, 256) for _ in range(40)])
    seen = 0
    for _ in range(8):
        before = digest(model)
        for one in model:
            one.data.view(-1)[torch.randint(one.numel(), (one.numel() // 200,))] += 1
        seen += digest(model) != before
    assert seen == 8


def test_a_parameter_that_is_replaced_is_seen_and_its_memory_is_free():
    model = Model()
    sampler = WeightSampler(lambda: [model])
    sampler.begin()
    before = sampler.digest()
    old = weakref.ref(model.wide.untyped_storage())
    model.wide = parameter(300, 200)
    assert old() is None
    sampler.begin()
    assert sampler.digest() == before, "it has the same values"
    model.wide.data = torch.zeros(300, 200, dtype=torch.bfloat16)
    sampler.begin()
    assert sampler.digest() != before


def test_a_model_without_a_readable_parameter_is_refused():
    with pytest.raises(ValueError, match="no parameter"):
        WeightWatch(lambda: [torch.nn.Linear(2, 2, device="meta")])


# ── when a sample is taken ───────────────────────────────────────────────────────────────────


def watch(model: torch.nn.Module) -> tuple[WeightWatch, Clock]:
    clock = Clock()
    return WeightWatch(lambda: [model], clock), clock


def test_a_sample_is_taken_once_a_second():
    model = Model()
    watched, clock = watch(model)
    assert watched.step(0) is None
    clock.now += PERIOD_S
    assert watched.step(0) == (watched.at_start, 0)
    model.bias.data.zero_()
    clock.now += 0.9 * PERIOD_S
    assert watched.step(0) is None
    clock.now += 0.1 * PERIOD_S
    assert watched.step(0) == (digest(model), 0)


def test_a_sample_is_taken_at_once_when_the_scheduler_looks():
    model = Model()
    watched, _ = watch(model)
    model.bias.data.zero_()
    assert watched.step(1) == (digest(model), 1)
    assert watched.step(1) is None
    assert watched.step(2) == (digest(model), 2)


def test_weights_are_not_touched_while_the_engine_may_be_asleep(monkeypatch: pytest.MonkeyPatch):
    model = Model()
    watched, clock = watch(model)
    clock.now += 100
    monkeypatch.setattr(WeightSampler, "begin", lambda _: pytest.fail("they may be unmapped"))
    assert watched.step(None) is None


class Device:
    """A GPU's stand-in: the test decides when a copy has arrived."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.arrived = True
        begin = weight_watch._Staging.begin

        def later(staging: Any, *views: Any) -> Any:
            begin(staging, *views)
            return self

        patch.setattr(weight_watch._Staging, "begin", later)

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        assert self.arrived, "a step would wait"


def test_a_sample_of_a_gpu_is_read_in_a_later_step(monkeypatch: pytest.MonkeyPatch):
    device, model = Device(monkeypatch), Model()
    watched, clock = watch(model)
    device.arrived = False
    assert [watched.step(1) for _ in range(3)] == [None] * 3
    clock.now += 10
    assert watched.step(2) is None, "one is under way"
    device.arrived = True
    assert watched.step(2) in [(watched.at_start, 1), (watched.at_start, 2)]
    assert watched.step(2) in [(watched.at_start, 2), None]


def test_a_sample_that_was_under_way_belongs_to_the_look_before(monkeypatch: pytest.MonkeyPatch):
    """The scheduler must not take weights of before a reset for those of after it."""
    device, model = Device(monkeypatch), Model()
    watched, _ = watch(model)
    device.arrived = False
    assert watched.step(1) is None
    device.arrived = True
    looks = [known[1] for _ in range(3) if (known := watched.step(2)) is not None]
    assert looks[-1] == 2 and set(looks) <= {1, 2}


# ── whose model ──────────────────────────────────────────────────────────────────────────────


class Runner:
    """As vLLM's: a connector is called from somewhere below it."""

    def __init__(self) -> None:
        self.model: torch.nn.Module = Model()
        self.drafter: Any = None

    def get_model(self) -> torch.nn.Module:
        return self.model

    def initialize(self) -> Any:
        return Below().register()


class Below:
    def register(self) -> Any:
        return models_of_caller()


def test_the_model_is_that_of_the_runner_that_calls_and_may_be_replaced():
    runner = Runner()
    models = runner.initialize()
    assert list(models()) == [runner.model]
    runner.model = Model()
    assert list(models()) == [runner.model]
    runner.drafter = Runner()
    assert list(models()) == [runner.model, runner.drafter.model]


def test_a_runner_is_not_kept_alive():
    runner = Runner()
    models = runner.initialize()
    del runner
    gc.collect()
    assert list(models()) == []


def test_without_a_runner_there_is_no_model():
    assert Below().register() is None
