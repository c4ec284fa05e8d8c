"""Division of training over ranks: their layout, and groups that share tensors, samples, experts or stages."""
