"""The page of one run: the reader of the run folder, the page itself, and its server on this machine's loopback.

Rule: a run folder is read and not changed, and its content is untrusted: invalid lines are skipped.
"""
