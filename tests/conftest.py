"""Settings of all tests: what a property test finds depends neither on how fast the machine is nor on the day, nor on
what else was imported, and a thread that a test leaves behind disturbs no other.

`pytest --hypothesis-profile=explore` looks where nobody has looked before.
"""

import logging
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

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
