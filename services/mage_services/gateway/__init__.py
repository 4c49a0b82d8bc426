"""Serve the policy over HTTP, by the protocols of OpenAI and Anthropic, to programs that play the
agent with a loop of their own.
"""
