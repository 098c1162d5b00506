"""The OpenAI-compatible HTTP server over an AsyncLLM. It knows jobs by name only, and no policy."""
