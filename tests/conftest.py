"""Settings of all tests: what a property test finds depends neither on how fast the machine is nor on the day, nor on
what else was imported.

`pytest --hypothesis-profile=explore` looks where nobody has looked before.
"""

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
