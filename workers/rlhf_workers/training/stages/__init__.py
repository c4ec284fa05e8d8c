"""Pipeline stages of models: cut, filled from files, adapted, moved to host memory, and computed.

Rule: a stage has Hugging Face's names outside, whatever its layers are called inside.
"""
