"""Who is next: the order, admission of new jobs, aging."""
