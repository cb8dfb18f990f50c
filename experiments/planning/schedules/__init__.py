"""Which layers share a bucket: plans made from measured times, in pure Python."""
