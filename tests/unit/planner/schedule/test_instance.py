"""An instance is read from JSON, written back, and rejected with the name and value of the invalid field."""

import json
from typing import Any

import pytest

from rlhf_planner.schedule.baselines import check_cap_possible
from rlhf_planner.schedule.instance import InstanceError, from_json, to_json


def good() -> dict[str, Any]:
    return {
        "devices": 2,
        "pipelines": [
            {
                "name": "actor",
                "stageDevices": [0, 1],
                "microbatches": 4,
                "forward": 5,
                "backward": [10, 11],
                "weightGradient": 5,
                "activation": 1.95,
            },
            {"name": "critic", "stageDevices": [1, 0], "microbatches": 2, "forward": 2, "backward": 4},
        ],
        "memoryCap": None,
        "transfer": 0.5,
    }


def test_round_trip_keeps_everything_and_the_key() -> None:
    instance = from_json(good())
    again = from_json(json.loads(json.dumps(to_json(instance))))
    assert again == instance
    assert again.key() == instance.key()
    assert instance.pipelines[0].backward == (10, 11)
    assert instance.pipelines[1].transfer == (0.5,)
    assert from_json({**good(), "transfer": 0}).key() != instance.key()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("devices",), 0, "devices: 0"),
        (("devices",), "two", "devices: 'two'"),
        (("pipelines",), [], r"pipelines: \[\]"),
        (("pipelines", 0, "forward"), -5, r"pipelines\[0\].forward\[0\]: -5"),
        (("pipelines", 0, "backward"), [1, 2, 3], r"pipelines\[0\].backward: \[1, 2, 3\]"),
        (("pipelines", 0, "forward"), float("nan"), r"pipelines\[0\].forward\[0\]: nan"),
        pytest.param(("pipelines", 0, "forward"), 10**400, "forward: 1000.*that a float can hold", id="huge"),
        (("pipelines", 0, "weightGradient"), 10, r"pipelines\[0\].weightGradient\[0\]: 10"),
        (("pipelines", 1, "stageDevices"), [1, 2], r"pipelines\[1\].stageDevices\[1\]: 2"),
        (("pipelines", 1, "stageDevices"), [], r"pipelines\[1\].stageDevices: \[\]"),
        (("pipelines", 1, "microbatches"), 0, r"pipelines\[1\].microbatches: 0"),
        (("pipelines", 1, "microbatches"), True, r"pipelines\[1\].microbatches: True"),
        (("pipelines", 1, "colour"), "red", r"pipelines\[1\].colour: 'red' is not valid; unknown field"),
        (("memorycap",), 3, "memorycap: 3 is not valid; unknown field"),
        (("memoryCap",), 1.0, r"memoryCap: 1.0 .* below one micro-batch \(pipelines\[0\].activation\[0\] = 1.95\)"),
        (("memoryCap",), -1, "memoryCap: -1"),
        (("transfer",), -1, r"pipelines\[0\].transfer\[0\]: -1"),
    ],
)
def test_errors_name_field_and_value(path: tuple[str | int, ...], value: object, message: str) -> None:
    data: Any = good()
    inner = data
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    with pytest.raises(InstanceError, match=message):
        from_json(data)


def test_missing_field_is_named() -> None:
    data = good()
    del data["pipelines"][0]["forward"]
    with pytest.raises(InstanceError, match=r"pipelines\[0\].forward: None is not valid; the field is required"):
        from_json(data)
    with pytest.raises(InstanceError, match="instance: 3 is not valid; give an object"):
        from_json(3)


def test_cap_below_one_micro_batch_of_several_stages_on_a_device() -> None:
    data = {
        "devices": 1,
        "pipelines": [
            {"stageDevices": [0, 0], "microbatches": 1, "forward": 1, "backward": 2, "activation": 1},
        ],
        "memoryCap": 1.5,
    }
    with pytest.raises(InstanceError, match=r"memoryCap: 1.5 .* holds 2 on device 0"):
        check_cap_possible(from_json(data))
