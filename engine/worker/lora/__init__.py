"""LoRA adapters in the worker: read from peft's folders, and added to the outputs of linears row by row."""
