"""Sharded training of targets and drafters."""
