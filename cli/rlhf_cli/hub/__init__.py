"""A trained model as the folder that a model hub expects: its checkpoint, its files, its card and its upload.

Rule: checkpoints are read and never changed. A card says what a run was, never where: no path of a machine, no address
and no content of a Secret leaves with a model.
"""
