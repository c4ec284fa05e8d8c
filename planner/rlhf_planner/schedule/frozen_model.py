"""A table in which one model is held: the others are trained as before, and it is not computed at all.

Owns one table. What is left of each row keeps its order. Stages of different pipelines never wait for each other, and
of a transfer both ends are kept or neither is, so what was free of deadlock still is. Of a fused table the parts of
the other models remain, which are then no faster than serial ones. Pure: same table, same rows.
"""

from rlhf_common.schedule import ScheduleTable


def without_model(table: ScheduleTable, model: str) -> ScheduleTable:
    """Return the table without the actions of a model's pipelines; all pipelines keep their numbers and ranks."""
    held = {index for index, pipeline in enumerate(table.pipelines) if pipeline.model == model}
    rows = tuple(tuple(action for action in row if action.pipeline not in held) for row in table.rows)
    return table.model_copy(update={"rows": rows})
