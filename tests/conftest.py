"""Settings of all tests.

The results of property tests depend on neither the machine's speed, nor the day, nor other imports. A thread that a
test leaves behind disturbs no other test. The garbage collector never walks the modules that collection imports.

`pytest --hypothesis-profile=explore` tries new examples.
"""

import logging
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from tests.support.full_tier import QUICK_TIER, try_fewer_examples, unmark_quick_cases

from rlhf_workers.loading import uncollected

settings.register_profile("explore", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
PROFILE = "same-everywhere"
settings.register_profile(PROFILE, settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile(PROFILE)

# Hypothesis tries numbers and words that stand in the code of this project, even where it draws no random numbers: in
# all modules that happen to be imported by then, which another test decides, and those that a compiler has just made.
_in_the_code = providers._get_local_constants
_none = Constants()


def _constants() -> Constants:
    """Return the constants of the code for the profile that explores, and none for reproducible examples."""
    return _none if settings.get_current_profile_name() == PROFILE else _in_the_code()


providers._get_local_constants = _constants


class _LoggersOfAMoment(dict[str, "logging.Logger | logging.PlaceHolder"]):
    """All loggers; pytest goes through them at the beginning of every test, while threads of others may import modules
    that make some."""

    def values(self) -> Any:
        """Return a copy of the present values."""
        return list(super().values())


logging.Logger.manager.loggerDict = _LoggersOfAMoment(logging.Logger.manager.loggerDict)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the collector, whose every later walk would otherwise go through all libraries and tests, too."""
    with uncollected():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the first cases of tests of the full tier in the quick tier, before `-m` selects.

    The quick tier tries fewer examples of property tests, unless `--hypothesis-profile` asks for others.
    """
    unmark_quick_cases(items)
    if config.option.markexpr == QUICK_TIER and settings.get_current_profile_name() == PROFILE:
        try_fewer_examples(items)
