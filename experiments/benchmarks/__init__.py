"""What ``python -m experiments.bench`` measures, one file per benchmark."""
