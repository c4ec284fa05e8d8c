"""The trackers of a run's metrics, spans and events; `registry.TRACKERS` lists those with output in the run folder.

To add one, write a class that follows `tracker.Tracker`, and add it to the registry.
"""
