"""Settings of all tests: what a property test finds depends neither on how fast the machine is nor on the day, nor on
what else was imported, a thread that a test leaves behind disturbs no other, and what is imported to collect them is
never walked by the garbage collector.

`pytest --hypothesis-profile=explore` looks where nobody has looked before.
"""

import logging
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from tests.support.full_tier import unmark_quick_cases

from rlhf_workers.loading import uncollected

settings.register_profile("explore", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same-everywhere", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same-everywhere")

# Hypothesis tries numbers and words that stand in the code of this project, even where it draws no random numbers: in
# all modules that happen to be imported by then, which another test decides, and those that a compiler has just made.
_in_the_code = providers._get_local_constants
_none = Constants()


def _constants() -> Constants:
    """What is in the code for who explores it; nothing for who wants the same examples tomorrow."""
    return _none if settings.get_current_profile_name() == "same-everywhere" else _in_the_code()


providers._get_local_constants = _constants


class _LoggersOfAMoment(dict[str, "logging.Logger | logging.PlaceHolder"]):
    """All loggers; pytest goes through them at the beginning of every test, while threads of others may import modules
    that make some."""

    def values(self) -> Any:
        """Return those of this moment, which nobody adds to."""
        return list(super().values())


logging.Logger.manager.loggerDict = _LoggersOfAMoment(logging.Logger.manager.loggerDict)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the collector, whose every later walk would otherwise go through all libraries and tests, too."""
    with uncollected():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the first cases of tests of the full tier in the quick tier, before `-m` selects."""
    unmark_quick_cases(items)
