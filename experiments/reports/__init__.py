"""From run folders to tables, figures and pages: frames, summaries, numbers of figures, how they look, Markdown, HTML.

May import: config, runs. Begin reading at frames.py, then summary.py, figure_numbers.py and all_figures.py.
"""
