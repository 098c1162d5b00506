"""How tenants and owners share an engine: the queue, slots in the batch, preemption, tokens of a step."""
