"""Callbacks for frameworks that keep the training loop. Their modules import their framework; micro imports none."""
