"""Sends the change that a verb means, and says what comes of it."""

from collections.abc import Callable

from rlhf_api import names
from rlhf_cli.cluster.changes import Change
from rlhf_cli.cluster.session import Session
from rlhf_cli.cluster.stored import Stored


async def send(session: Session, name: str, made: Callable[[Stored], Change], *, dry_run: bool) -> int:
    """One patch, or none when there is nothing to change."""
    job = await session.job(name)
    change = made(job)
    if change.patch:
        await session.api.patch(names.PLURAL, job.namespace, name, dict(change.patch), dry_run=dry_run)
    session.write([f"{name} {change.told}" + (" (dry run: nothing was changed)" if dry_run and change.patch else "")])
    return 0
