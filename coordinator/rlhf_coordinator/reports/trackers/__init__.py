"""The trackers of a run's metrics, spans and events: one module per kind, listed in `registry.TRACKERS`.

To add one, write a module with a class that follows `tracker.Tracker`, and add its line to the registry.
tests/unit/coordinator/reports/test_tracker_contract.py checks every entry against the contract.
"""
