"""Breaking our decoders: seeds, a mutator, and what may come of an input."""
