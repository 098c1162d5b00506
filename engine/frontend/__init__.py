"""Before the core: requests checked and sent, outputs detokenized; LLM, LLMEngine and AsyncLLM."""
