"""Communication between training ranks: rendezvous, transport, operations, and time-outs.

Rule: all ranks of an operation call it, in the same order.
"""
