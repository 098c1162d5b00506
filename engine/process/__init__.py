"""What every process of a server needs: spawning, logging, trimming memory, private folders."""
