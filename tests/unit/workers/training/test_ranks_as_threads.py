"""The hub through which ranks meet as threads in these tests loses no transfer, for any order of arrival."""

import sys
import threading
from collections.abc import Iterator

import pytest
from tests.support.training.training_ranks import ThreadHub

HUBS = 2000
"""Number of hubs; before there was a lock, one in 250 had two queues."""


@pytest.fixture
def threads_that_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_that_change_often")
def test_a_pair_of_ranks_that_ask_at_once_have_one_queue() -> None:
    for _ in range(HUBS):
        hub, gate, found = ThreadHub(), threading.Barrier(2), list[object]()

        def ask(hub: ThreadHub = hub, gate: threading.Barrier = gate, found: list[object] = found) -> None:
            gate.wait()
            found.append(hub.queue(0, 1))

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert found[0] is found[1]
