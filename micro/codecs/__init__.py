"""Codecs: how values and indices are encoded as bytes, one file per codec."""
