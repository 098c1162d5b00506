"""Keys from a file, what each may use, and what each has used."""
