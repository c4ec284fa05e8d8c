"""Updates between ranks after their steps: copies of a stage with shared moments, and parameters in parts.

Rule: all ranks call these at the same point of training. A single rank may publish or save, so publishing and saving
must never gather.
"""

from collections.abc import Collection, Mapping

from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.optimizers.optimizer import StageOptimizer
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.schedule.step_spans import measured

Optimizers = Mapping[tuple[str, int], StageOptimizer]


def broadcast_updates(
    models: Collection[str], layout: RankLayout, optimizers: Optimizers, communicator: Communicator, span: SpanSink
) -> None:
    """Send the parameters that each copy of a stage with shared moments stepped to the other copies."""
    shared = [key for key in layout.local_stages if key[0] in models and optimizers[key].shares.part]
    if shared:
        with measured(span, "train/hand-on"):
            for key in shared:
                optimizers[key].share_updates(communicator)


def gather_weights(
    models: Collection[str], layout: RankLayout, optimizers: Optimizers, communicator: Communicator, span: SpanSink
) -> None:
    """Gather whole parameters of the models that ranks hold in parts."""
    if any(optimizer.part for optimizer in optimizers.values()):
        with measured(span, "train/gather"):
            for key in layout.local_stages:
                if key[0] in models and (layout.writes(*key) or optimizers[key].over_data):
                    optimizers[key].gather(communicator)
