"""The agent policy (jobs, pins, order) and the command line that joins all parts."""
