"""What crosses processes: messages, parameters of requests, statistics, events."""
