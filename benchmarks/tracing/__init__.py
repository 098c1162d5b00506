"""What a trace costs."""
