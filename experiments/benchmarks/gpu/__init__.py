"""``bench gpu``: Triton's kernels checked, timed where there is a GPU, and compiled for GPUs that are not there.

Begin reading at command.py, then timing.py and compiling.py.
"""
