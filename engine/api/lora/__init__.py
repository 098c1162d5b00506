"""Adapters over HTTP: their names, and the routes by which operators load and unload them."""
