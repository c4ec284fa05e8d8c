"""Division of training over ranks: their layout, and groups that share tensors, contexts, experts or parts of a stage."""
