"""Division of training over ranks: their layout, and groups that share tensors, contexts, experts or parts of a stage.

Rule: the schedule table and the manifest determine each rank's work.
"""
