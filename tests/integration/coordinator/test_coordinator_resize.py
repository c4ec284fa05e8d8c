"""Groups that grow and shrink during an iteration: nothing is lost, no worker restarts, the weights are the same."""

import asyncio
from pathlib import Path

import grpc
import pytest
from tests.support.coordinator.coordinated import Coordinated, expected_weights, make_job
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import Crew, SimulatedWorker, crew

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import aio_channel
from rlhf_common.control_pb2_grpc import CoordinatorStub
from rlhf_common.names import Group

pytestmark = pytest.mark.full


async def resize(coordinated: Coordinated, **replicas: int) -> None:
    async with aio_channel(coordinated.address, None) as channel:
        await CoordinatorStub(channel).Resize(pb.ResizeRequest(replicas=replicas))


async def test_generation_grows_to_four_and_shrinks_to_one_while_inference_doubles(tmp_path: Path) -> None:
    pace = Pace(tokens_per_tick=2)
    job = make_job(tmp_path, iterations=4, inference={"replicas": 1})
    coordinated = Coordinated(job, tmp_path / "run")
    run = coordinated.start()

    def some(group: Group, *indices: int) -> Crew:
        return Crew([SimulatedWorker(group, index, coordinated.address, pace=pace) for index in indices])

    counts = {Group.GENERATION: 1, Group.INFERENCE: 1, Group.TRAINING: 2}
    crews = [crew(counts, coordinated.address, pace=pace), some(Group.GENERATION, 1)]
    try:
        await coordinated.until("Generating", 1)
        crews += [some(Group.GENERATION, 2, 3), some(Group.INFERENCE, 1)]
        await resize(coordinated, generation=4, inference=2)
        await coordinated.until("Generating", 2)
        pace.tokens_per_tick = 0  # it stays in this iteration until they have joined
        async with asyncio.timeout(120):
            while not all(worker.roles for worker in run.state.fleet):  # noqa: ASYNC110 it is the coordinator's own
                await asyncio.sleep(0.005)
        assert len(run.state.fleet.workers) == 4 + 2 + 2
        pace.tokens_per_tick = 2
        await resize(coordinated, generation=1)
        await crews.pop(1).end(0.0)
        await crews.pop(1).end(0.0)
        assert (await coordinated.outcome()).phase == "Complete"
        assert run.state.fleet.sizes == {Group.GENERATION: 1, Group.INFERENCE: 2, Group.TRAINING: 2}
        assert crews[0]["training-0"].weights == expected_weights(job)
        assert [worker.registered for worker in crews[0].workers] == [1, 1, 1, 1], "nobody was restarted"
    finally:
        await coordinated.cancel()
        for item in crews:
            await item.end(0.0)


async def test_a_group_that_trains_keeps_its_size(tmp_path: Path) -> None:
    coordinated = Coordinated(make_job(tmp_path), tmp_path / "run")
    coordinated.start()
    try:
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be resized"):
            await resize(coordinated, training=3)
    finally:
        await coordinated.cancel()
