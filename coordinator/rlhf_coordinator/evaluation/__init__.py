"""Evaluation during training: a weight version answers prompts; the responses are scored, never trained on.

  rounds    the begin, the record and the abandonment of an evaluation; the seconds that the iteration waits for it
  figures   the result as numbers

Rule: the samples of an evaluation have their own ledger (`state.evaluation_state`). Nothing here changes the ledger of
the batch. `scheduling.evaluation` decides who decodes them and when.
"""
