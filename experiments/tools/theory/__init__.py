"""The theory of top-k checked on a real training, of ``python -m experiments.theory``.

Begin reading at measure.py, then files.py.
"""
