"""Read run folders into one table of runs, and make tables, figures and pages from it.

May import: config, runs. Begin reading at frames.py, then table.py, forms.py, pages.py and run_figures.py.
"""
