"""The reproduction of a paper, of ``python -m experiments.reproduce``: its parts, carried out in turn, and its page.

Begin reading at papers.py, then parts.py and paper_page.py.
"""
