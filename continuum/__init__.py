"""The agent policy: recognizes jobs, decides how long to keep their KV, orders the queue, and learns from
them."""
