"""Assignment of cores and CUDA devices to processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_cli.local.devices import DeviceDemand, LocalMachine, allot_devices
from rlhf_cli.local.errors import RunError
from rlhf_common.names import Group

C, G, T, I = Group.COORDINATOR, Group.GENERATION, Group.TRAINING, Group.INFERENCE  # noqa: E741


def demand(group: Group, index: int = 0, threads: int = 1, gpus: int = 0) -> DeviceDemand:
    return DeviceDemand(f"{group}-{index}", group, threads, gpus)


def test_every_process_has_its_own_cores_when_there_are_enough() -> None:
    shares = allot_devices([demand(C), demand(G, 0, 2), demand(T, 0)], LocalMachine((4, 5, 6, 7))).shares
    assert shares["coordinator-0"].cores is None
    assert shares["generation-0"].cores == frozenset({4, 5})
    assert shares["training-0"].cores == frozenset({6})


def test_nobody_is_pinned_when_cores_are_short_and_the_user_is_told() -> None:
    allotment = allot_devices([demand(G, 0, 2), demand(T, 0, 2)], LocalMachine((0, 1)))
    assert {share.cores for share in allotment.shares.values()} == {None}
    assert allotment.notes == ("4 compute threads share 2 cores",)


def test_a_process_with_a_gpu_is_not_pinned() -> None:
    shares = allot_devices([demand(C), demand(G, 0, gpus=1), demand(I, 0)], LocalMachine((4, 5, 6), ("0",))).shares
    assert shares["generation-0"].cores is None
    assert shares["inference-0"].cores == frozenset({4})


def test_groups_share_devices_only_when_they_must() -> None:
    demands = [demand(G, 0, gpus=1), demand(G, 1, gpus=1), demand(I, 0), demand(T, 0, gpus=1)]
    plenty = allot_devices(demands, LocalMachine(tuple(range(64)), ("0", "1", "2"))).shares
    assert [plenty[d.name].gpus for d in demands] == [("0",), ("1",), (), ("2",)]
    short = allot_devices(demands, LocalMachine(tuple(range(64)), ("0", "1")))
    assert [short.shares[d.name].gpus for d in demands] == [("0",), ("1",), (), ("0",)]
    assert "share 2 CUDA devices" in short.notes[0]


def test_the_members_of_a_group_share_devices_where_it_alone_has_too_many() -> None:
    demands = [demand(G, 0, gpus=1), demand(G, 1, gpus=1), demand(G, 2, gpus=1), demand(T, 0, gpus=1)]
    allotment = allot_devices(demands, LocalMachine((0,), ("4", "5")))
    assert [allotment.shares[d.name].gpus for d in demands] == [("4",), ("5",), ("4",), ("4",)]
    assert [allotment.shares[d.name].sharers for d in demands] == [3, 1, 3, 3]
    assert "generation: processes that need 3 CUDA devices share 2" in allotment.notes


@pytest.mark.parametrize("gpus", [(), ("0",)])
def test_a_process_that_does_not_fit_is_refused_by_field(gpus: tuple[str, ...]) -> None:
    with pytest.raises(
        RunError, match=rf"spec\.training\.gpusPerReplica: 2: this machine has {len(gpus)} CUDA devices"
    ):
        allot_devices([demand(T, 0, gpus=2)], LocalMachine((0,), gpus))


@given(
    st.lists(st.tuples(st.sampled_from([G, I, T]), st.integers(1, 4), st.integers(0, 3)), max_size=8),
    st.integers(1, 40),
    st.integers(0, 8),
)
def test_shares_overlap_inside_a_group_only_where_it_is_too_large(
    wants: list[tuple[Group, int, int]], cores: int, gpus: int
) -> None:
    demands = [demand(g, i, t, n) for i, (g, t, n) in enumerate(sorted(wants, key=lambda want: want[0]))]
    try:
        shares = allot_devices(demands, LocalMachine(tuple(range(cores)), tuple(map(str, range(gpus))))).shares
    except RunError:
        return
    for group in (G, I, T):
        taken = [gpu for d in demands if d.group is group for gpu in shares[d.name].gpus]
        assert len(taken) == sum(d.gpus for d in demands if d.group is group)
        assert len(set(taken)) == min(len(taken), gpus)
    for d in demands:
        users = [sum(gpu in shares[other.name].gpus for other in demands) for gpu in shares[d.name].gpus]
        assert shares[d.name].sharers == max(users, default=1)
        assert len(set(shares[d.name].gpus)) == d.gpus
    pinned = [core for d in demands for core in shares[d.name].cores or ()]
    assert len(pinned) == len(set(pinned))
