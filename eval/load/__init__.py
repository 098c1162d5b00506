"""Load on a server: jobs replayed over HTTP, and what is recorded of them."""
