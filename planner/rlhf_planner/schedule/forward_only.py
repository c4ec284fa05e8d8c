"""A table of forwards alone: a model goes once over the micro-batches of a mini-batch, and nothing is trained.

Owns one table. Its stages are where the table of training has them, so it runs on the same ranks. Free of deadlock
even when every transfer blocks both of its ranks, for the reason of `serial`: rows are parts of one global sequence,
here wave by wave: the computations of a wave, then the transfers of what they made. Pure: same table, same rows.
"""

from rlhf_api.schedule import Action, ScheduleTable
from rlhf_planner.schedule.serial import of_place

METHOD = "forward-only"


def forward_only(table: ScheduleTable, model: str) -> ScheduleTable:
    """Return the table that runs the forwards of a model's pipelines where `table` places them; the other pipelines
    keep their numbers and have no actions."""
    rows: list[list[Action]] = [[] for _ in table.rows]
    chosen = [(index, pipeline) for index, pipeline in enumerate(table.pipelines) if pipeline.model == model]

    def act(rank: int, action: Action) -> None:
        for place in range(table.pipelines[action.pipeline].width):
            rows[rank + place].append(of_place(action, place))

    waves = max((len(pipeline.stage_ranks) + pipeline.microbatches - 1 for _, pipeline in chosen), default=0)
    for wave in range(waves):
        # Later stages first: one that shares its rank with the stage before takes what that made a wave ago.
        steps = [
            (index, stage, wave - stage, pipeline.stage_ranks)
            for index, pipeline in chosen
            for stage in reversed(range(len(pipeline.stage_ranks)))
            if 0 <= wave - stage < pipeline.microbatches
        ]
        for index, stage, microbatch, ranks in steps:
            act(ranks[stage], Action(kind="F", pipeline=index, stage=stage, microbatch=microbatch))
        for index, stage, microbatch, ranks in steps:
            if stage + 1 < len(ranks) and ranks[stage] != ranks[stage + 1]:
                sender, receiver = ranks[stage], ranks[stage + 1]
                act(sender, Action(kind="SEND_F", pipeline=index, stage=stage, microbatch=microbatch, peer=receiver))
                act(
                    receiver, Action(kind="RECV_F", pipeline=index, stage=stage + 1, microbatch=microbatch, peer=sender)
                )
    return ScheduleTable(method=METHOD, pipelines=table.pipelines, rows=tuple(tuple(row) for row in rows))
