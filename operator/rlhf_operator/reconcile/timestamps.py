"""Converts times of the API server and computes durations. Pure: now is an argument."""

from collections.abc import Iterable
from datetime import UTC, datetime

from rlhf_operator.untrusted import UnreadableError, moment


def rfc3339(time: datetime) -> str:
    """Return a time in the API server's format: UTC, whole seconds."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_of(text: str | None) -> datetime | None:
    """Return a time of the API server in UTC; None for None, for invalid text, and for the start of 1970."""
    try:
        return moment(text, "time")
    except UnreadableError:
        return None


def seconds_until(time: datetime | None, now: datetime) -> float | None:
    """Return the seconds until a time, 0 if it has passed; None for None."""
    return None if time is None else max(0.0, (time - now).total_seconds())


def soonest(seconds: Iterable[float | None]) -> float | None:
    """Return the smallest number of seconds; None if there is none."""
    return min((value for value in seconds if value is not None), default=None)
