"""What grammars cost per token."""
