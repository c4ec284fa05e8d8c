"""The loop of the coordinator: messages change the state, the scheduler decides on it, actions carry out the decisions.

Rule: an invalid message ends its session.
"""
