"""Schedules: decide from measured times which layers share a bucket."""
