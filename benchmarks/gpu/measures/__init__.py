"""The code that runs on the device: each section in a separate process, so that none can harm another."""
