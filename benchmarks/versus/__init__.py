"""Quire and its peers on the same checkpoints and workloads, in one run. `python -m benchmarks.versus --help`."""
