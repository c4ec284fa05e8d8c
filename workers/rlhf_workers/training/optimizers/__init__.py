"""Optimizer steps of a stage: AdamW, whole or in parts, on the device or from host memory.

Rule: the location of moments changes no bit of a step.
"""
