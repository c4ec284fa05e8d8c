"""`rlhf explain` of a job in a cluster: the largest losses, as its coordinator last logged them.

Rule: it reads with the user's own rights, like `rlhf describe`. If there are no such log lines, or the log is
unreadable, it prints that.
"""

from rich.text import Text

from rlhf_cli.cluster.cluster_session import ClusterSession, now
from rlhf_cli.cluster.job_details import JobDetails, read_details
from rlhf_cli.console import paragraph
from rlhf_common.names import ExitCode


async def explain(session: ClusterSession, name: str) -> int:
    """Print why a job takes as long as it does. Return the exit code."""
    session.write(explanation(await read_details(session, name, now()), session.width))
    return int(ExitCode.OK)


def explanation(details: JobDetails, width: int | None) -> list[Text]:
    """Return the lines that are printed, wrapped at `width` characters; None means no limit."""
    if details.losses:
        return [
            line
            for number, words in enumerate(details.losses, 1)
            for line in paragraph(Text(f"{number}. {words}"), width)
        ]
    lines = [Text(f"not read: {missing}", style="yellow") for missing in details.missing]
    silent = (
        "Its coordinator has logged no losses: no iteration is finished, no loss reaches 3%, its log was cut off "
        "since, or spec.metrics is Disabled."
    )
    return [*paragraph(Text(silent), width), *lines]
