"""Scheduling and KV-cache bookkeeping: no torch, sockets, text, asyncio or clock. Callers pass the time."""
