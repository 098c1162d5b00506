"""What the scheduler alone costs, beside vLLM's."""
