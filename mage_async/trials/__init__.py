"""How one trial is played: chat format, prompts, transcript, action parser, the trial."""
