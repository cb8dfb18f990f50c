"""The forms of operations on a GPU, written in Triton, which is imported with the modules of this folder."""
