"""The output of a run for people: trackers write while it runs, `run_figures` draws figures from their files."""
