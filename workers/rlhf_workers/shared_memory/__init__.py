"""Memory that two processes of one machine share, so that bytes need no connection.

Rule: a region belongs to the process that allocated it; borrowers only read it.
"""
