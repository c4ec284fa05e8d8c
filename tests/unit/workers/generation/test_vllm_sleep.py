"""A vLLM engine frees and takes memory in the order without a peak, never at the level that discards weights."""

from typing import Any

import pytest
import torch

from rlhf_workers.generation.vllm_engine.core import VllmCore
from rlhf_workers.generation.vllm_engine.host_caches import HostCaches, storages_of
from rlhf_workers.generation.vllm_engine.sleeping import Sleeper


class Calls:
    """A core that records its calls; `failing` fails once."""

    def __init__(self, failing: str = "") -> None:
        self.said: list[str] = []
        self._failing = failing

    def _say(self, name: str) -> None:
        if name == self._failing:
            self._failing = ""
            raise MemoryError(name)
        self.said.append(name)

    def sleep(self) -> None:
        self._say("sleep")

    def wake_weights(self) -> None:
        self._say("weights")

    def wake_caches(self) -> None:
        self._say("caches")


def test_weights_come_before_caches_and_nothing_comes_or_goes_twice() -> None:
    core = Calls()
    sleeper = Sleeper(core)
    sleeper.wake()
    sleeper.sleep()
    sleeper.sleep()
    sleeper.wake()
    sleeper.wake()
    assert core.said == ["sleep", "weights", "caches"]


def test_weights_alone_come_to_be_loaded_and_caches_when_they_are_needed() -> None:
    core = Calls()
    sleeper = Sleeper(core)
    sleeper.sleep()
    sleeper.wake_weights()
    assert core.said == ["sleep", "weights"]
    sleeper.wake()
    sleeper.sleep()
    assert core.said == ["sleep", "weights", "caches", "sleep"]


@pytest.mark.parametrize("failing", ["weights", "caches"])
def test_what_fails_half_way_is_tried_again_from_there(failing: str) -> None:
    core = Calls(failing)
    sleeper = Sleeper(core)
    sleeper.sleep()
    with pytest.raises(MemoryError, match=failing):
        sleeper.wake()
    sleeper.wake()
    assert core.said == ["sleep", "weights", "caches"]


def test_vllm_is_never_asked_to_forget_weights() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    class RecordedCalls:
        def __getattr__(self, name: str) -> Any:
            return lambda **named: asked.append((name, named))

    core = VllmCore.__new__(VllmCore)
    core._core, core._sleeps = RecordedCalls(), True
    core.sleep()
    core.wake_weights()
    core.wake_caches()
    assert asked == [
        ("sleep", {"level": 1, "mode": "abort"}),
        ("wake_up", {"tags": ["weights"]}),
        ("wake_up", {"tags": ["kv_cache"]}),
    ]


def test_memory_behind_caches_goes_and_comes_back_zeroed_under_the_same_tensors() -> None:
    shared = torch.ones(1000)
    layers = [shared[:500].view(10, 50), shared[500:], torch.ones(7)]
    caches = HostCaches(storages_of([[layers[0], layers[1]], layers[2]]))
    assert caches.free() == 4028
    assert (caches.free(), shared.untyped_storage().nbytes()) == (0, 0)
    assert caches.take() == 4028
    assert caches.take() == 0
    assert all(not layer.any() for layer in layers)
    layers[0].fill_(3)
    assert shared[:500].eq(3).all()
