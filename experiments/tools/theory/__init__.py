"""Check the theory of top-k on a real training, for ``python -m experiments.theory``.

Begin reading at measure.py, then files.py.
"""
