"""Published weights: stored by the learner, sent to the engines."""
