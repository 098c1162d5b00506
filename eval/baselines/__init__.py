"""Policies to compare with: published rules and an oracle, each on one page."""
