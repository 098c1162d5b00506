"""The learned model of remaining work: features, trees, and scores."""
