"""What belongs to one tool: method comparison, simulated steps, theory of top-k, paper reproduction; a package each.

May import: config to training. Modules here are shared by several tools. Begin reading at methods.py and
gradient_sources.py, then method_comparison/trial.py.
"""
