"""Weights in few bits: one value object that everything which makes quantized weights ends in, and every kernel that
computes with them begins with.

`weight` is the object, `rounding` makes it of plain weights at load, `layers` says which layers get it.
"""
