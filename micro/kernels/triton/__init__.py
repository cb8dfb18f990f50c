"""GPU implementations of the hot operations in Triton, which is imported with the modules of this folder."""
