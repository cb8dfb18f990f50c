"""Ranks that stay up and call functions, on this machine or on hosts that are network namespaces of it.

May import: config. Used by benchmarks, profiles, the doctor and tests; trainings are launched by torchrun's agent.
Begin reading at group.py.
"""
