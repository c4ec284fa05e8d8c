"""The loop of the coordinator: messages change the state, the scheduler decides on it, actions carry out the decisions.

  loop            the ticks: decide, and carry out the decisions
  event_handlers  the effects of messages, with sample_handler, score_handler, sample_failures and command_results
  sample_sets     the samples of the batch and of the evaluation, and their differences; refill_events for new prompts
  message_checks  limits for messages; device_memory_check for a registration
  actions         the effect of each kind of decision; leases for samples
  recovery        the return of a coordinator from its journal

Rule: an invalid message ends its session.
"""
