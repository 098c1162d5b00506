"""The agent policy: whose turn it is, how long its KV is kept, who is next, and what is learned of it."""
