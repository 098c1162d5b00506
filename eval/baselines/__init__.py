"""Baseline policies: published rules and an oracle, each in one short module."""
