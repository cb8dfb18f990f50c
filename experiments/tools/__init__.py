"""The ring around the core: one folder for each command that measures or studies, and what they share.

The core never imports from here. May import: the core, ``shared``, ``ranks`` and other tools below it. Begin reading at
shared/methods.py and shared/gradient_sources.py, then compare/trial.py.
"""
