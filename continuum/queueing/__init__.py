"""The queue: its order, admission of new jobs, aging."""
