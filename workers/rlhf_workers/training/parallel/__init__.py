"""How ranks divide training: their layout, and groups that share tensors, contexts, experts or parts of a stage.

Rule: which rank does what follows from the schedule table and the manifest.
"""
