"""The loop of the coordinator: messages change the state, the scheduler decides on it, actions carry out the decisions.

  loop            the ticks: decide and carry out until no decision is left
  event_handlers  the effects of messages: sample_handler for messages about samples, with score_handler and
                  sample_failures; command_results for the answers to commands
  sample_sets     the samples of the batch and of the evaluation, and their differences; refill_events for new prompts
  message_checks  the checks of messages, except those with results of samples; device_memory_check for a registration
  actions         the effect of each kind of decision; leases for samples
  recovery        the return of a coordinator from its journal

Rule: an invalid message ends its session. The scheduler decides from the state. Some commands need no decision and are
sent at once: a worker that decodes a sample of an old lease must drop it, for example.
"""
