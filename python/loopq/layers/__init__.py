"""The grid of a layer, its codes and scales, and transforms of its input."""
