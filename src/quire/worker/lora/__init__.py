"""LoRA adapters in the worker: the matrices they change, reading and packing them, and those of a step's requests."""
