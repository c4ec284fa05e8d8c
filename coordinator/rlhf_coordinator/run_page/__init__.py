"""The page of one run: the reader of the run folder, the page itself, and its server on this machine's loopback.

Must never change a run folder.
"""
