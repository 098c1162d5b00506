"""The command line: what ``continuum`` runs, and the flags of ``serve``."""
