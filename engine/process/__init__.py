"""What every process of a server does: how it is spawned, logs, trims memory, keeps private files."""
