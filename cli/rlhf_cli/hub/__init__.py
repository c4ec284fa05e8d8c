"""A trained model as the folder that a model hub expects: its checkpoint, its files, its card and its upload.

Rule: checkpoints are read and never changed. A card describes the run but not its place: it contains no path of a
machine, no address and no content of a Secret.
"""
