"""Pipeline stages of models: cut, filled from files, adapted, moved to host memory, and computed.

Rule: a stage uses Hugging Face's names externally, independent of its internal names.
"""
