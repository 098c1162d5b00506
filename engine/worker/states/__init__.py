"""States of layers that keep one of fixed size for a sequence instead of KV for each token."""
