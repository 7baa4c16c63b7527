"""CUDA kernels: packed layout, loading, the int4 product and the modules that use it."""
