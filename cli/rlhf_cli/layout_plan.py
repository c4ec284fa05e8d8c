"""The training layouts of `rlhf plan`: the memory and load of a rank in each, and which fit a named device."""

from dataclasses import dataclass
from typing import Any, Self

from rich.table import Table

from rlhf_api.job import RLHFJobSpec
from rlhf_cli.console import output, size
from rlhf_planner.device_memory import GIBIBYTE, Sizes
from rlhf_planner.training_layouts import TrainingLayout, layout_of, layout_problem, layouts


@dataclass(frozen=True)
class TrainingLayouts:
    """The possible layouts for a job's number of ranks."""

    asked: TrainingLayout
    """Layout in the job's spec."""
    others: tuple[TrainingLayout, ...]
    """The layouts of as many ranks, with the job's own if it is among the choices."""
    device_bytes: int | None
    problem: str
    """Reason why the job's own layout does not fit the device; empty if it fits or no device was named."""

    @classmethod
    def from_spec(cls, spec: RLHFJobSpec, sizes: Sizes, device_gib: float | None) -> Self:
        """Return the layouts of a resolved job; `device_gib` is the memory of one device."""
        device_bytes = None if device_gib is None else int(device_gib * GIBIBYTE)
        problem = "" if device_bytes is None else layout_problem(spec, sizes, device_bytes)
        return cls(layout_of(spec, sizes), tuple(layouts(spec, sizes, spec.training.ranks)), device_bytes, problem)

    def document(self) -> dict[str, Any]:
        """Return the layouts for --json."""
        return {
            "layout": self._entry(self.asked),
            "layouts": [self._entry(layout) for layout in self.others],
            "device_memory": self.device_bytes,
            "problem": self.problem,
        }

    def _entry(self, layout: TrainingLayout) -> dict[str, Any]:
        return {
            **layout.parallelism.model_dump(by_alias=True, exclude_none=True),
            "memory": layout.memory.total,
            "host_memory": sum(layout.memory.host.values()),
            "memory_unknown": list(layout.memory.unknown),
            "busy": round(layout.busy, 4),
            "seconds_by_rank": round(layout.seconds_by_rank, 6),
            "fits": None if self.device_bytes is None else layout.fits(self.device_bytes),
        }

    def print(self) -> None:
        """Print the layouts if there is a choice or a device was named."""
        choices = [
            layout for layout in self.others if not layout.parallelism.offload_optimizer
        ]  # each layout occurs twice
        if len(choices) < 2 and self.device_bytes is None:
            return
        out, ranks = output(), self.asked.parallelism.ranks
        out.print(f"\nTraining layouts of {ranks} rank{'s' if ranks > 1 else ''}", style="bold")
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
        for heading in ("layout", "memory of a rank", "of its host", "busy", "to one rank", "fits", ""):
            table.add_column(heading, justify="left" if heading in ("layout", "") else "right", no_wrap=True)
        for layout in self.others:
            own = layout.parallelism == self.asked.parallelism
            table.add_row(*self._row(layout), "this job" if own else "")
        out.print(table)
        out.print(
            "Memory as above. Busy: share of a mini-batch by serial 1F1B with equal stages; transfers, sums "
            "and moments that come from the host are on top.",
            style="dim",
        )
        if self.problem:
            out.print(f"does not fit: {self.problem}", markup=False, soft_wrap=True)

    def _row(self, layout: TrainingLayout) -> tuple[str, ...]:
        memory = "unknown" if layout.memory.unknown else size(layout.memory.total)
        fits = "" if self.device_bytes is None else "yes" if layout.fits(self.device_bytes) else "no"
        host = size(moments) if (moments := sum(layout.memory.host.values())) else ""
        return layout.words, memory, host, f"{layout.busy:.0%}", f"{layout.seconds_by_rank:.3f}", fits
