"""The API server's side of the core: checks and sends requests, detokenizes outputs; LLM, LLMEngine and
AsyncLLM."""
