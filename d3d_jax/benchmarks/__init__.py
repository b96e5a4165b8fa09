"""Measuring: modes side by side, the parts of a round, and what the cost model says of them."""
