"""Whose turn it is: jobs, their branches, and how a prompt continues one."""
