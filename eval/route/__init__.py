"""``continuum route``: one address for several whole servers, ours or vLLM's."""
