"""Settings of all tests: what a property test finds depends neither on how fast the machine is nor on the day.

`pytest --hypothesis-profile=explore` looks where nobody has looked before.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("explore", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same-everywhere", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("same-everywhere")
