"""Clients of other projects' stores, each a ``KVStore``. Their libraries are imported only if chosen."""
