"""Runs models that pool: what a folder says of it, the vector of a prompt, and encoders."""
