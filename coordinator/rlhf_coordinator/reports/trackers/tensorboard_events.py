"""TensorBoard event files, written with TensorBoard's own record format.

Rule: each process writes a new file with a START record at its first step.
"""

import importlib
import importlib.util
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlhf_coordinator.reports.sample_table import SampleRow, best_first, visible
from rlhf_coordinator.reports.trackers.tracker import Tracker

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

FOLDER: Final = "tensorboard"
_STRING: Final = 7
"""DT_STRING of TensorBoard's tensors."""


class TensorBoardEvents(Tracker):
    """One event file of this process, created with the first event.

    Raises ModuleNotFoundError where TensorBoard is not installed.
    """

    def __init__(self, run_dir: Path, next_iteration: int) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError("there is no module tensorboard: pip install tensorboard")
        self._folder = run_dir / FOLDER
        self._next_step = self._first_step = next_iteration
        self._writer: RecordWriter | None = None
        threading.Thread(target=importlib.import_module, args=("tensorboard.summary.writer.record_writer",)).start()

    def iteration(self, iteration: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Write the finite values under their names, unless the iteration is below the next one to record. Raises
        OSError."""
        if iteration >= self._next_step:
            self._next_step = iteration + 1
            self._scalars(iteration, time_ns, metrics)

    def evaluation(self, version: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        """Write the finite values at the step of this version. Raises OSError."""
        self._scalars(version, time_ns, metrics)

    def _scalars(self, step: int, time_ns: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in sorted(metrics.items())
            if math.isfinite(value)
        ]
        self._write(Event(wall_time=time_ns / 1e9, step=step, summary=Summary(value=values)))

    def samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        """Write the best and the worst sample with a reward, each as a block of plain text.

        Nothing is written for an iteration below the next one. Raises OSError.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        judged = best_first(rows)
        if iteration < self._next_step or not judged:
            return
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        values = [
            Summary.Value(
                tag=f"samples/{name}",
                metadata=metadata,
                tensor=TensorProto(dtype=_STRING, string_val=[_as_text(row).encode()], tensor_shape=TensorShapeProto()),
            )
            for name, row in (("best", judged[0]), ("worst", judged[-1]))
        ]
        self._write(Event(wall_time=time.time(), step=iteration, summary=Summary(value=values)))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file. Raises OSError."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, event: "Event") -> None:
        if self._writer is None:
            self._writer = self._open(event.wall_time)
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def _open(self, wall_time: float) -> "RecordWriter":
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(wall_time):010d}.{socket.gethostname()}.{os.getpid()}.{self._first_step}"
        writer = RecordWriter((self._folder / name).open("ab"))
        writer.write(Event(wall_time=wall_time, file_version="brain.Event:2").SerializeToString())
        start = SessionLog(status=SessionLog.START)
        writer.write(Event(wall_time=wall_time, step=self._first_step, session_log=start).SerializeToString())
        return writer


def _as_text(row: SampleRow) -> str:
    """Return a sample as text of which every line is indented by four blanks, which Markdown shows as it is."""
    reward = f"reward {row.reward:.4g}, sample {row.sample}, {row.response_tokens} tokens, {row.finish_reason}"
    lines = [reward, "", *visible(row.prompt).split("\n"), "", "->", "", *visible(row.response).split("\n")]
    return "\n".join("    " + line for line in lines)
