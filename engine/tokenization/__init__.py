"""Text to tokens and back: tokenizers, chat templates, long texts encoded in parts."""
