"""The operations a forward pass is made of (linear layers, norms, rotations, experts), each behind one signature.

`specs` and `base` define them. `reference` implements them in torch, on any device; `native` and its neighbours call
the C++ library of csrc/ through ctypes. `registry.choose_kernels` chooses once per worker. A layer gets its kernel once
its weights are loaded.
"""
