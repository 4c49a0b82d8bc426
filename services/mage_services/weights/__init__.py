"""Store published weights for the learner, and send them to the engines."""
