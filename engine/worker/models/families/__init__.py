"""The families that run natively, one module each: how their config determines a decoder's shape."""
