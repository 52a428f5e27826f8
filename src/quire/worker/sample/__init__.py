"""From logits to tokens: `sampler.sample` is the entry, `metadata` says how each row is sampled, and `kernel` is the
interface of what computes (`torch_kernel` here, or kernels/native_sampling.py).
"""
