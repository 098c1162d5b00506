"""Components that the requests of one API server process share."""
