"""Parsers of the reasoning before an answer. No engine, no HTTP."""

from __future__ import annotations

from engine.reasoning.think import ThinkSection, ThinkTags

__all__ = ["ThinkSection", "ThinkTags"]
