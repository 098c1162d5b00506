"""A trace in the forms that other programs read. Each knows its form and nothing of the others."""
