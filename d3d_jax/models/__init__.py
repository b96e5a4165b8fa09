"""What is computed: the Qwen3 trunk, its cache, and the drafter."""
