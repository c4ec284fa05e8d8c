"""A trained model as the folder that a model hub expects: its checkpoint, its files, its card and its upload."""
