"""How many drafts are accepted: the definitions, and acceptance without running the target."""
