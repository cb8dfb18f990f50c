"""Groups of rank processes that call functions, on this machine or in network namespaces on it.

`profile`, `bench`, `doctor` and tests measure with them; trainings use torchrun's agent instead. Begin reading at
group.py.
"""
