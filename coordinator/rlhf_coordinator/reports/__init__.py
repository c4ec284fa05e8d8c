"""What a run leaves behind for people: trackers write while it runs, `run_figures` draws when it is over.

Rule: nothing here changes what the job does, or is read by it.
"""
