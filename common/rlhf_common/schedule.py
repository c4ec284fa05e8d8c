"""A pipeline schedule as data: the ordered work of each training rank for one optimizer step (one mini-batch).

The planner makes these tables, training ranks execute them. Must never contain times: a table is an order, not a
forecast.

Meaning of an action of (pipeline, stage, microbatch) on the rank that holds that stage of that pipeline:

  F       forward; keeps what the backward needs             B  whole backward = I then W
  I       input-gradient half of the backward                W  weight-gradient half, any time after its I
  SEND_F  activation to the next stage's rank (`peer`)       RECV_F  activation from the previous stage's rank
  SEND_B  input gradient to the previous stage's rank        RECV_B  output gradient from the next stage's rank

`stage` and `microbatch` of a transfer are the *sender's* for SEND_*, the *receiver's* for RECV_*. Two stages of one
pipeline on the same rank need no transfer actions between them. For each ordered pair of ranks the k-th send on one
side matches the k-th receive on the other.
In a pipeline of width w, w neighbouring rows hold each stage in parts, and do its computations together.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]


class _Table(BaseModel):
    # A newer coordinator may send fields that a worker does not know.
    model_config = ConfigDict(extra="ignore", frozen=True)


class Action(_Table):
    """One step of one rank: a computation or a transfer."""

    kind: Kind
    pipeline: int
    stage: int
    microbatch: int
    peer: int | None = None
    """Rank on the other side of a transfer; None for computation."""


class Pipeline(_Table):
    """One pipeline of one model, with the rank of each stage."""

    name: str
    """Name, unique in the table, such as `actor` or `critic-1`."""
    model: str
    """Role of the trained model, such as `actor`."""
    stage_ranks: tuple[int, ...]
    """Rank of each stage, in order; the first of its rows if the stage has several."""
    microbatches: int
    width: int = 1
    """Number of rows that hold a stage together; every stage starts at a multiple of it."""


class ScheduleTable(_Table):
    """Rows for the ranks of one data-parallel block; rank numbers count from 0 inside the block."""

    method: str
    """Name of the solver or baseline, such as `serial-1f1b`."""
    pipelines: tuple[Pipeline, ...]
    rows: tuple[tuple[Action, ...], ...]
    """Actions of each rank, in order."""
