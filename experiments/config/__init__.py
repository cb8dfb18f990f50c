"""From command-line words to a checked run: schema, composition, run identity, optimizer and SLURM settings, errors.

May import: nothing else of experiments. Begin reading at schema.py, then compose.py.
"""
