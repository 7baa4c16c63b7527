"""Host side of the W4A16 kernels: layout, cuts, launches and the operator."""
