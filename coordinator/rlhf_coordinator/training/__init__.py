"""What is done with the training ranks over many commands: choosing their schedule, saving a checkpoint.

Owns the choice of the schedule table, made once in the life of a job, and the saving of one checkpoint at a time.
Rule: searches and file work run concurrently with the loop, in a process or thread; answers to an earlier attempt are
told apart by its id. Must never let a failed choice stop the job: it then trains by the serial table.
"""
