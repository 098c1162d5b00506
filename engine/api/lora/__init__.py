"""Adapters over HTTP: their names, and the routes with which operators load and unload them."""
