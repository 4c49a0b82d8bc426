"""Serve a policy (OpenAI's chat API) or an environment (OpenEnv's or AgentGym's protocol) over
HTTP."""
