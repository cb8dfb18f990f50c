"""Soak: trainings that are disturbed, and given again until they end. Begin reading at __main__.py."""
