"""The CUDA kernels of solvers, and what every kernel needs: sources, compiling, launches."""
