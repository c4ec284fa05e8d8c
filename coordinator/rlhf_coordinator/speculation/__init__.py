"""The job-wide part of speculative decoding: shared draft hints, and statistics of drafts.

  sharing   sends tokens of siblings and of earlier epochs to the workers that draft from them
  learned   what workers learn about drafts, stored with the job
  summary   descriptions of drafting in words

This package carries out the decisions of `scheduling.sibling_sharing`.
"""
