"""Workers that share a model: what each computes, and how they exchange it."""
