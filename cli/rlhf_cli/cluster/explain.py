"""`rlhf explain` of a job in a cluster: the largest losses from the coordinator's log, and decisions from status.plan.

Rule: a log without loss lines is no error; the output says so.
"""

from typing import Final

from rich.text import Text

from rlhf_cli.cluster.cluster_session import ClusterSession, now
from rlhf_cli.cluster.job_details import JobDetails, read_details
from rlhf_cli.console import paragraph
from rlhf_common.names import ExitCode

_DECISIONS: Final = {"rounds": "longRounds", "plan for spec.devices": "drift"}
"""Title -> field of status.plan."""


async def explain(session: ClusterSession, name: str) -> int:
    """Print why a job takes as long as it does. Return the exit code."""
    session.write(explanation(await read_details(session, name, now()), session.width))
    return int(ExitCode.OK)


def explanation(details: JobDetails, width: int | None) -> list[Text]:
    """Return the lines that are printed, wrapped at `width` characters; None means no limit."""
    plan = details.job.status.get("plan") or {}
    decisions = [
        line
        for title, field in _DECISIONS.items()
        if plan.get(field)
        for line in paragraph(Text(f"{title}: {plan[field]}"), width)
    ]
    if details.losses:
        numbered = (Text(f"{number}. {words}") for number, words in enumerate(details.losses, 1))
        return [line for text in numbered for line in paragraph(text, width)] + decisions
    lines = [Text(f"not read: {missing}", style="yellow") for missing in details.missing]
    silent = (
        "Its coordinator has logged no losses: no iteration is finished, no loss reaches 3%, its log was cut off "
        "since, or spec.metrics is Disabled."
    )
    return [*paragraph(Text(silent), width), *lines, *decisions]
