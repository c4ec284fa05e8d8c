"""The loop of the coordinator: messages change the state, the state is decided on, decisions are carried out.

  loop            the ticks: decide, carry out, until nothing is left to decide
  event_handlers  what a message changes: sample_handler for messages about samples, with score_handler and
                  sample_failures; command_results for the answers to commands
  sample_sets     the samples of the batch and of the evaluation, and where the two differ
  message_checks  what a message must be before anything looks at it; device_memory_check, of a registration
  actions         how each kind of decision is carried out; leases, of samples
  recovery        how a coordinator comes back from its journal

Owns the order of the three, and the checks that a message passes before it is believed.
Rule: a result is in the journal before it is decided on; a message that makes no sense ends the session that it came
by. What to do follows from the state, by the scheduler. Two answers are sent at once, as they need no decision: a
worker that decodes a sample of an old lease is told to drop it, and a session that is refused is told why.
"""
