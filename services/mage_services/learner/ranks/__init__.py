"""Shard a learner's model over ranks; rank 0 is the learner process itself."""
