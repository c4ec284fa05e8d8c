"""The output of a run for people: trackers write while it runs, `run_figures` draws when it is over.

Rule: the job's decisions do not depend on it. A required tracker that cannot record an iteration ends the job.
"""
