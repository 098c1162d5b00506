"""Policies to compare with: published rules and an oracle, each a policy object in a page."""
