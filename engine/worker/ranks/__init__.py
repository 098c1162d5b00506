"""Tensor parallel ranks as processes: starts them, sends them steps, and merges their reports."""
