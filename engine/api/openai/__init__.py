"""OpenAI's chat and completions: bodies, responses, and what other APIs share with them."""
