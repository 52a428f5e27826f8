"""From logits to tokens. `sampler.sample` is the way in; `philox`, `filters`, `edits` and `logprobs` are its parts."""
