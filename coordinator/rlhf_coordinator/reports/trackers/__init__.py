"""Where a run's metrics, spans and events go: one module per kind of tracker, found in `registry.TRACKERS`.

To add one: a module with a class that follows `tracker.Tracker`, and its line in the registry;
tests/unit/coordinator/reports/test_tracker_contract.py holds every entry to the contract.
"""
