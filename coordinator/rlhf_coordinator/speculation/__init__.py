"""The job-wide part of speculative decoding: shared draft hints, and statistics of drafts.

It carries out the decisions of `scheduling.sibling_sharing`.
"""
