"""A table in which one model is frozen: it is not computed, and the others are trained as before. Rule: pure.

A table free of deadlock stays free of it, because both ends of a transfer stay or go together.
"""

from rlhf_common.schedule import ScheduleTable


def without_model(table: ScheduleTable, model: str) -> ScheduleTable:
    """Return the table without the actions of a model's pipelines; all pipelines keep their numbers and ranks."""
    frozen = {index for index, pipeline in enumerate(table.pipelines) if pipeline.model == model}
    rows = tuple(tuple(action for action in row if action.pipeline not in frozen) for row in table.rows)
    return table.model_copy(update={"rows": rows})
