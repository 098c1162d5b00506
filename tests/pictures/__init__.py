"""Tests that compare models that read pictures with transformers."""
