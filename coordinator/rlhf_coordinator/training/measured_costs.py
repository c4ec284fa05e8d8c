"""costs.json of a run: the costs that its training ranks measured, for `rlhf plan`.

It is written whenever all ranks have reported.
"""

import logging

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.storage.journal import write_atomically
from rlhf_planner.plan_search.cost_document import COSTS_FILE, CostDocument

log = logging.getLogger(__name__)


def observe(run: JobRun, observation: pb.Observation) -> None:
    """Record the costs of a rank; with the last rank's, write the file.

    Raises ValueError for an invalid document or an impossible rank.
    """
    if observation.WhichOneof("work") != "training_costs":
        return
    measured, world = observation.training_costs, run.context.spec.training.ranks
    if measured.rank >= world:
        raise ValueError(f"observation.training_costs.rank is {measured.rank}, the job has {world} ranks")
    documents = run.state.rank_costs
    documents[measured.rank] = CostDocument.read(measured.document)
    if len(documents) < world:
        return
    costs = documents.pop(0)
    for rank in sorted(documents):
        costs = costs.merged(documents[rank])
    documents.clear()
    path = run.journal.folder.parent / COSTS_FILE
    try:
        write_atomically(path, costs.text().encode())
    except OSError as error:
        log.warning("%s is not written: %s", path, error)
        return
    run.event("costs-measured", f"the costs of training are measured: {path}")
