"""Play one trial: chat format, prompts, transcript, action parser, the state of the trial."""
