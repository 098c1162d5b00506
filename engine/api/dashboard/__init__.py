"""``GET /dashboard``: a live page of the engine, and the feed it reads."""
