"""What pins and prompts have left in the folder of saved KV, and how the core finds it."""
