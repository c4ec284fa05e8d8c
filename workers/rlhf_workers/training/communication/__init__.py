"""What crosses between training ranks: how they meet, the transport, the operations, and how long they wait.

Rule: all ranks of an operation call it, in the same order.
"""
