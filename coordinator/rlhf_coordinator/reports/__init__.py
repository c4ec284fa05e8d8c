"""The output of a run for people: trackers write while it runs, `run_figures` draws when it is over.

Rule: nothing here changes the job's behaviour, and the job reads nothing of it.
"""
