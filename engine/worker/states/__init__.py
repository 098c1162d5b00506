"""States of layers that keep a state of fixed size per sequence instead of KV per token."""
