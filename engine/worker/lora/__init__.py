"""LoRA adapters in the worker: reads peft's folders, and adds adapters to linears' outputs row by row."""
