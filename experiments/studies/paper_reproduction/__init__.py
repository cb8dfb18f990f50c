"""The reproduction of a paper, of ``python -m experiments.reproduce``: its parts, carried out in turn, and its page.

May import: what studies may. Begin reading at papers.py, then parts.py and page.py.
"""
