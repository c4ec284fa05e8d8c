"""A table of forwards: a model processes the micro-batches of a mini-batch once without training. Rule: pure.

Rows are parts of one global sequence, so the table is free of deadlock even if transfers block both ranks.
"""

from rlhf_common.schedule import Action, ScheduleTable
from rlhf_planner.schedule.serial import add

METHOD = "forward-only"


def forward_only(table: ScheduleTable, model: str) -> ScheduleTable:
    """Return the table that runs the forwards of a model's pipelines where `table` places them.

    The other pipelines have no actions and keep their numbers.
    """
    rows: list[list[Action]] = [[] for _ in table.rows]
    chosen = [(index, pipeline) for index, pipeline in enumerate(table.pipelines) if pipeline.model == model]
    waves = max((len(pipeline.stage_ranks) + pipeline.microbatches - 1 for _, pipeline in chosen), default=0)
    for wave in range(waves):
        # Later stages first: a stage on the same rank as the previous stage takes that one's output of the previous
        # wave.
        steps = [
            (index, stage, wave - stage, pipeline.stage_ranks)
            for index, pipeline in chosen
            for stage in reversed(range(len(pipeline.stage_ranks)))
            if 0 <= wave - stage < pipeline.microbatches
        ]
        for index, stage, microbatch, ranks in steps:
            action = Action(kind="F", pipeline=index, stage=stage, microbatch=microbatch)
            add(rows, ranks[stage], action, table.pipelines[index].width)
        for index, stage, microbatch, ranks in steps:
            if stage + 1 < len(ranks) and ranks[stage] != ranks[stage + 1]:
                sender, receiver = ranks[stage], ranks[stage + 1]
                send = Action(kind="SEND_F", pipeline=index, stage=stage, microbatch=microbatch, peer=receiver)
                receive = Action(kind="RECV_F", pipeline=index, stage=stage + 1, microbatch=microbatch, peer=sender)
                add(rows, sender, send, table.pipelines[index].width)
                add(rows, receiver, receive, table.pipelines[index].width)
    return ScheduleTable(method=METHOD, pipelines=table.pipelines, rows=tuple(tuple(row) for row in rows))
