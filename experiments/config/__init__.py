"""From words to a checked run: schema, composition, run identity, optimizer and SLURM settings, and their errors.

May import: nothing else of experiments. Begin reading at schema.py, then compose.py.
"""
