"""Quantized weights. `weight` defines the value object that kernels compute with and makes it from plain weights by
rounding; `formats` reads it from the layouts of quantized checkpoints.
"""
