"""Used by every process of a server: spawning, logging, trimming memory, private folders."""
