"""The tick of the coordinator: take in what workers say, decide, carry it out.

Owns the order of the three, and the checks that a message passes before anything is believed.
Rule: a result is in the journal before it is decided on; what makes no sense ends the session that it came by.
What to do follows from the state alone. The one message that is answered at once is a report of a sample that the
worker's lease does not cover any more: it is told to forget the sample (`sample_moves.fenced`).
"""
