"""Several engine cores behind the same API servers."""
