"""What clients of hosted APIs request from a prompt cache: lifetimes, and the reason why a prefix was not
reused."""
