"""What belongs to one tool: method comparison, simulation, theory and paper studies, with their figures and tables.

May import: config to training. Begin reading at method_comparison.py, then simulated_steps.py.
"""
