"""How the bundled model was made: its dialogues, its tokenizer, its network, its training and its score."""
