"""The page of one run: what is read of a run folder for it, the page itself, and its server on this machine's loopback.

Rule: a run folder is read and never changed, and nothing of it is believed: what is no line of the file it is in is
passed over. Nothing here knows the job that runs; it works on a folder that was copied from elsewhere as well.
"""
