"""Pictures and audio in prompts: reads, decodes and stores them for the model."""
