"""Serve the policy to programs that are the agent, over HTTP, by the protocols of OpenAI and
Anthropic.
"""
