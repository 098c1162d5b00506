"""The OpenAI-compatible HTTP server over an AsyncLLM. It knows jobs only by name, and no policy."""
