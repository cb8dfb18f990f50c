"""Ranks that stay up and call functions, on this machine or on hosts that are network namespaces of it.

`profile`, `bench`, `doctor` and tests measure on them; trainings are launched by torchrun's agent. Begin
reading at group.py.
"""
