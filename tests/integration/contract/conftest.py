"""The cluster fixtures and the unit tests' table of manifests, for tests against a real API server."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(_TESTS), str(_TESTS / "unit" / "contract")]

from cluster.fixture import api_cluster  # noqa: E402

__all__ = ["api_cluster"]
