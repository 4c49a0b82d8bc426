"""Our environments offered to other programs, over OpenEnv's protocol."""
