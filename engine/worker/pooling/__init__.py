"""Runs models that pool: reads their folders, computes the vector of a prompt, and runs encoders."""
