"""Evaluation during training: a weight version's responses to prompts of its own, judged and never trained on.

  rounds    an evaluation begins, is recorded, is given up; what the iteration waited for it
  leases    its samples go to workers, to be decoded and judged
  messages  what workers say of them
  figures   what came of it, as numbers

Rule: its samples are in a ledger of their own (`state.evaluation_state`), under numbers that no sample of a batch has;
nothing here touches the ledger of the batch. Who decodes when is decided by `scheduling.evaluation`.
"""
