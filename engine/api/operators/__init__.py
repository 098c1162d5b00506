"""Endpoints for operators, and for clients that report on their jobs."""
