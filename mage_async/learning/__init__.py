"""The learner's arithmetic: model, loss, optimizer step, warm start, checkpoints."""
