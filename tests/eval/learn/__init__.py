"""Tests of continuum learn."""
