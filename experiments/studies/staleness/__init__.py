"""How long elements wait between two updates, per parameter and method."""
