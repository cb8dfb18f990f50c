"""What a machine can do: checks that stand alone, a link that is measured, and what follows for sparsifying."""
