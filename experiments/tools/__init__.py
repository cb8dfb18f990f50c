"""Tools around the core: one folder per command that measures or studies, and their shared code.

The core never imports from here. Tools may import the core, ``shared``, ``ranks`` and the tools below them. Begin with
shared/methods.py and shared/gradient_sources.py, then compare/trial.py.
"""
