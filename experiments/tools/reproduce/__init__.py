"""Reproduce a paper, for ``python -m experiments.reproduce``: its parts in order, and its page.

Begin reading at papers.py, then parts.py and paper_page.py.
"""
