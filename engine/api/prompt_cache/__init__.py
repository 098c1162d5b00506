"""What clients of hosted APIs ask of a prompt cache: lifetimes, and why a prefix was not reused."""
