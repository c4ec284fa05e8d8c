"""A table in which one model is frozen: it is not computed, and the others are trained as before.

Owns one table. The remaining actions of each row stay in order. Stages of different pipelines exchange no data, and
both ends of a transfer stay or go together, so a table free of deadlock stays free of it. Pure: same table, same rows.
"""

from rlhf_common.schedule import ScheduleTable


def without_model(table: ScheduleTable, model: str) -> ScheduleTable:
    """Return the table without the actions of a model's pipelines; all pipelines keep their numbers and ranks."""
    frozen = {index for index, pipeline in enumerate(table.pipelines) if pipeline.model == model}
    rows = tuple(tuple(action for action in row if action.pipeline not in frozen) for row in table.rows)
    return table.model_copy(update={"rows": rows})
