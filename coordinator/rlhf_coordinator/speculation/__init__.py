"""Speculative decoding as far as it concerns the whole job: what workers draft by, and what they learned of it.

  sharing   tokens of siblings and of earlier epochs on their way to the workers that draft by them
  learned   what workers learn of drafts: kept with the job, and given to those that start
  words     what drafts do, in words with numbers

Owns what becomes of the decisions of `scheduling.sibling_sharing`. Rule: whatever goes wrong here makes tokens slower
and changes none. Must never hold up a lease: what is sent is bounded each time.
"""
