"""Readers and checks of model folders in the formats of Hugging Face.

They must never import torch, nor load a tensor into a library.
"""
