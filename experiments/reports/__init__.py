"""From run folders to tables, figures and pages: frames, measures, plot style, label placement, Markdown and HTML.

May import: config, runs. Begin reading at frames.py, then tables.py and figures.py.
"""
