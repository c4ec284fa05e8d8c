"""The contract: what users write, what processes say to each other, and the names everything goes by.

Everything here is data and its validation. It must never import torch, kopf, or any of our other packages.
"""
