"""Scheduling and KV-cache bookkeeping. Pure: no torch, sockets, text, asyncio or clock: time is given."""
