"""Devices, meshes and where arrays live."""
