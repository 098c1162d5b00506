"""What HTTP, the API server and busy cores cost."""
