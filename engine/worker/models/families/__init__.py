"""The families that run natively, a page each: how a decoder's shape follows from their config."""
