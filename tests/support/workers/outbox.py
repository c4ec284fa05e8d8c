"""An outbox of a worker's roles that stores their reports."""

from typing import Any

from rlhf_common import control_pb2 as pb


class RecordedOutbox:
    """The `Outbox` of a role under test; stores its reports in order."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        """(kind of report, report); the kind of an observation is that of its work."""
        self.answers: list[pb.CommandDone] = []
        self.tokens = 0
        self.moves: list[tuple[str, int]] = []
        """(kind of move, bytes)."""

    def progress(self, message: pb.SampleProgress) -> None:
        self.said.append(("progress", message))

    def finished(self, message: pb.FinishedSample) -> None:
        self.said.append(("finished", message))

    def failed(self, message: pb.FailedSample) -> None:
        self.said.append(("failed", message))

    def scored(self, message: pb.ScoredSample) -> None:
        self.said.append(("scored", message))

    def prefix(self, message: pb.ScoredPrefix) -> None:
        self.said.append(("prefix", message))

    def done(self, message: pb.CommandDone) -> None:
        self.said.append(("done", message))
        self.answers.append(message)

    def span(self, name: str, start_ns: int, end_ns: int, iteration: int, **attributes: str) -> None:
        assert start_ns <= end_ns
        self.said.append(("span", (name, start_ns, end_ns, iteration, attributes)))

    def observe(self, observation: pb.Observation) -> None:
        assert observation.start_ns <= observation.end_ns
        self.said.append((str(observation.WhichOneof("work")), observation))

    def count(self, tokens: int) -> None:
        self.tokens += tokens

    def moved(self, kind: str, size: int, seconds: float) -> None:
        assert size >= 0
        assert seconds >= 0
        self.moves.append((kind, size))

    def reports(self, kind: str) -> list[Any]:
        """Return the reports of a kind, in order."""
        return [report for said, report in self.said if said == kind]

    @property
    def spans(self) -> list[str]:
        """Return the names of the spans, in order."""
        return [span[0] for span in self.reports("span")]
