"""Offer an environment to other programs, over OpenEnv's or AgentGym's protocol, on a server."""
