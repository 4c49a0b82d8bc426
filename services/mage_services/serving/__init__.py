"""Servers that offer an environment to other programs, over OpenEnv's or AgentGym's protocol."""
