"""What a forward pass computes with: linear layers, norms, rotations, attention, each behind one signature.

`base` says what kernels there are, `reference` has them in torch, on any device; `native` calls the C++ library of
csrc/ through ctypes. `registry.choose_kernels` picks once per worker; layers are given theirs once their weights are
loaded.
"""
