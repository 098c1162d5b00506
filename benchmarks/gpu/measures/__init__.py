"""What runs on the device: each section in a process of its own, so that none can harm another."""
