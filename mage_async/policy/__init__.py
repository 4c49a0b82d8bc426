"""The policy as a model: loaded or built, warm-started, checkpointed, copied for publication."""
