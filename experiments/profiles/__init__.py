"""What ``python -m experiments.profile`` measures, one file per command."""
