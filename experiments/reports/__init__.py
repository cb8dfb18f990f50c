"""From run folders to one table of runs, and from that to tables, figures and pages.

May import: config, runs. Begin reading at frames.py, then table.py, forms.py, pages.py and run_figures.py.
"""
