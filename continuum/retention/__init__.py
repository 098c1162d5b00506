"""How long KV is kept, and who gives way: TTL rules, pins, revocation, shares of tenants."""
