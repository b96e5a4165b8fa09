"""Parameters on disk, both directions: Hugging Face folders and orbax checkpoints."""
