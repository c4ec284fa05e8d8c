"""A worker's log lines name the iteration of its commands."""

import pytest

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import FIRST_AHEAD_SAMPLE
from rlhf_workers.logs import iteration_of

KEY = pb.SampleKey(iteration=3, sample=1)
AHEAD = pb.SampleKey(iteration=4, sample=FIRST_AHEAD_SAMPLE + 1)


@pytest.mark.parametrize(
    ("command", "iteration"),
    [
        (pb.Command(generate=pb.Generate(samples=[pb.GenerateSample(key=KEY)])), 3),
        (pb.Command(score=pb.Score(samples=[pb.ScoreSample(key=KEY)])), 3),
        (pb.Command(train=pb.Train(iteration=0)), 0),
        (pb.Command(generate=pb.Generate()), None),
        (pb.Command(generate=pb.Generate(samples=[pb.GenerateSample(key=AHEAD)])), None),
        (pb.Command(exit=pb.Exit()), None),
    ],
)
def test_a_command_about_an_iteration_names_it(command: pb.Command, iteration: int | None) -> None:
    assert iteration_of(command) == iteration
