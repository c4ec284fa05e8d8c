"""Work with the training ranks that takes many commands: choosing their schedule, saving a checkpoint.

It owns the choice of the schedule table, made once while the alternatives stay the same, the choice of critic overlap
in mode Auto, and the saving of one checkpoint at a time.
Rule: searches and file work run beside the loop, in a process or thread; an id identifies answers to an earlier
attempt. A failed choice must never stop the job, which then trains with the serial table.
"""
