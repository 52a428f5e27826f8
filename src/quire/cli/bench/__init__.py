"""`quire bench`: how fast this machine runs a model. Prompts are token ids, outputs have a fixed length."""
