"""Several engine cores that share API servers."""
