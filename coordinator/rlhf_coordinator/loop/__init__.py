"""The turn of the coordinator: take in what workers say, decide, carry it out.

Owns the order of the three, and the checks that a message passes before anything is believed.
Rule: a result is in the journal before it is decided on; what makes no sense ends the session that it came by.
Must never answer a message with a decision of its own: what to do follows from the world alone.
"""
