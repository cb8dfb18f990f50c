"""The theory of top-k checked on a real training, of ``python -m experiments.theory``.

May import: what studies may. Begin reading at accumulators.py, then bound.py and files.py.
"""
