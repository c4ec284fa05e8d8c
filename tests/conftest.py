"""Settings of all tests: what a property test finds must not depend on how fast the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile("any-machine", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
