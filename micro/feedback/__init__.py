"""Feedbacks: what happens to the part of a gradient that was not sent."""
