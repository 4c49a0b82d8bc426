"""Our environments offered to other programs, over OpenEnv's or AgentGym's protocol."""
