"""The model in the box: its tasks, its tokenizer, its training and its score."""
