"""Evaluation during training: a weight version's responses to prompts of its own, judged and never trained on.

  rounds    an evaluation begins, is recorded, is given up; the seconds for which the iteration waited for it
  figures   its result, as numbers

Rule: its samples are in a ledger of their own (`state.evaluation_state`), under numbers that no sample of a batch has;
nothing here touches the ledger of the batch. `scheduling.evaluation` decides who decodes them and when. Leases and
messages take the path of the batch (`loop.sample_sets`).
"""
