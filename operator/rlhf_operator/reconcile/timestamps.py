"""Times as the API server writes them, and what is left until one. Pure: now is an argument."""

from collections.abc import Iterable
from datetime import UTC, datetime

from rlhf_operator.untrusted import UnreadableError, moment


def rfc3339(time: datetime) -> str:
    """Return a time as the API server writes it: UTC, whole seconds."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def time_of(text: str | None) -> datetime | None:
    """Return a time of the API server, which is RFC 3339 in UTC; None for none, and for what is no time."""
    try:
        return moment(text, "time")
    except UnreadableError:
        return None


def seconds_until(time: datetime | None, now: datetime) -> float | None:
    """Return the seconds that are left until a time, 0 when it is over; None for none."""
    return None if time is None else max(0.0, (time - now).total_seconds())


def soonest(seconds: Iterable[float | None]) -> float | None:
    """Return the smallest number of seconds; None when there is none."""
    return min((value for value in seconds if value is not None), default=None)
