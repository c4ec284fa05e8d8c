"""What is observed of a job and its pods, read from what others wrote: records whose fields have types and bounds."""
