"""Retention of KV: TTL rules, pins, revocation, shares of tenants."""
