"""The fixtures of the steps for pytest without `scripts/gpu-check`: no results are written."""

from gpu_check.plugin import (  # noqa: F401
    figures,
    machine,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_runtest_call,
    pytest_runtest_makereport,
    pytest_runtest_setup,
)
