"""What continuum learn makes of recordings and traces."""
