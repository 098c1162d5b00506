"""Pictures in prompts: how they reach the model."""
