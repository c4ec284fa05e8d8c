"""A rank reports its waits only while they last, in a text of bounded length."""

import pytest

from rlhf_workers.training.communication.collective_waits import LONGEST, present_wait
from rlhf_workers.training.communication.communicator import PeerLostError, waiting_for


def test_a_rank_says_what_it_waits_for_while_it_does() -> None:
    assert present_wait() == ""
    with waiting_for("a transfer of rank 1"):
        assert present_wait() == "a transfer of rank 1"
    assert present_wait() == ""
    with pytest.raises(PeerLostError, match="a transfer of rank 1"), waiting_for("a transfer of rank 1"):
        raise RuntimeError("connection closed by peer")
    assert present_wait() == "", "what came to its end is waited for no more"


def test_what_is_waited_for_is_never_longer_than_the_coordinator_takes() -> None:
    with waiting_for(f"ranks {', '.join(map(str, range(4096)))} to join a reduction"):
        assert len(present_wait()) == LONGEST
        assert present_wait().endswith("...")
