"""OpenAI's Responses API: items in, items and events out, and stored responses between turns."""
