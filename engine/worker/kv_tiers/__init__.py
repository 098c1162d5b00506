"""Offloaded KV blocks in host memory and on disk: slots, copies and the threads that copy."""
