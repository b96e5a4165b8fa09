"""Autoregressive, synchronous and asynchronous decoding."""
