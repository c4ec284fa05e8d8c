"""Optimizer steps of a stage: AdamW, whole or in parts, on the device or from host memory.

Rule: where moments are held changes no bit of a step.
"""
