"""From parallelism to an instance: merged stages, K1 and K2, opposite directions, and errors that name the field."""

import dataclasses
from typing import Any

import pytest

from rlhf_planner.schedule.instance import InstanceError
from rlhf_planner.schedule.transform import ModelLayout, fused_block


def model(name: str, tensor: int, stages: int, data: int, size: int = 1) -> ModelLayout:
    times = tuple(float(s + 1) for s in range(stages))
    return ModelLayout(name, tensor, stages, data, size, times, times, (0.5,) * stages, times)


def test_two_small_pipelines_meet_one_large_in_opposite_directions() -> None:
    block = fused_block(model("actor", 2, 8, 2), model("critic", 2, 4, 4), mini_batch=64)
    assert block.instance.devices == 8
    assert block.repeats == 2
    assert block.gpus_per_device == 2
    assert block.copies == ((0, 0), (1, 0), (1, 1))
    assert [p.name for p in block.instance.pipelines] == ["actor", "critic-0", "critic-1"]
    assert [p.stage_devices for p in block.instance.pipelines][1:] == [(3, 2, 1, 0), (7, 6, 5, 4)]
    assert [p.microbatches for p in block.instance.pipelines] == [32, 16, 16]


def test_stages_of_the_smaller_tensor_degree_are_merged() -> None:
    block = fused_block(model("actor", 8, 4, 1), model("critic", 2, 8, 2), mini_batch=8)
    critic = block.instance.pipelines[1]
    assert block.gpus_per_device == 8
    assert critic.stage_devices == (1, 0)
    assert critic.forward == (2.5, 6.5)  # means of stages 1 to 4 and 5 to 8
    assert block.repeats == 1


def test_sizes_that_do_not_divide_name_the_field() -> None:
    actor, critic = model("actor", 2, 8, 2), model("critic", 2, 4, 4)
    bad: list[tuple[str, dict[str, Any]]] = [
        ("mini_batch: 7", {"mini_batch": 7}),
        ("first.tensor: 3", {"first": dataclasses.replace(actor, tensor=3)}),
        ("second.data: 3", {"second": dataclasses.replace(critic, data=3)}),
        ("second.data: 8", {"second": dataclasses.replace(critic, data=8)}),
        ("first.microbatch_size: 0", {"first": dataclasses.replace(actor, microbatch_size=0)}),
        (r"first.forward: \(1.0,\)", {"first": dataclasses.replace(actor, forward=(1.0,))}),
        ("second.stages: 3", {"first": model("actor", 8, 4, 2), "second": model("critic", 4, 3, 4)}),
    ]
    for message, change in bad:
        with pytest.raises(InstanceError, match=message):
            fused_block(**{"first": actor, "second": critic, "mini_batch": 64, **change})
