"""From text to batches of token ids. Numpy only: nothing here imports jax."""
