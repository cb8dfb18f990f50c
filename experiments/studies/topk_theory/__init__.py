"""The theory of top-k checked on a real training, of ``python -m experiments.theory``.

May import: what studies may. Begin reading at measure.py, then files.py.
"""
