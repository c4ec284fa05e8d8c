"""Readers and checks of model folders in the formats of Hugging Face.

They must never load a tensor into a library, and never import torch.
"""
