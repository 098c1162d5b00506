"""Parsers of the reasoning before an answer. They do not know the engine or HTTP."""

from __future__ import annotations

from engine.reasoning.think import ThinkSection, ThinkTags

__all__ = ["ThinkSection", "ThinkTags"]
