"""The ranks over which a learner's model is sharded; rank 0 is the learner process itself."""
