"""Chat inside the process that runs the library verifiers: one request per turn, without tools.

Verifiers' own harnesses start a program for every turn. This one plays every seat (an agent of
verifiers' environment) to which `environment.options.environment` gives no other harness.
"""

import httpx

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["ChatHarness", "ChatHarnessConfig"]


class ChatHarnessConfig(vf.HarnessConfig):
    """Declare a configuration without settings."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Send the conversation to the endpoint of its rollout."""

    # Tasks with a system prompt are accepted; it is the first message.
    APPENDS_SYSTEM_PROMPT = True
    # For every turn verifiers calls `launch` again, with the whole conversation so far in `data`.
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Request one completion. Its answer is not returned: verifiers' endpoint has put it into
        the trace. No program is started, so `runtime` is not used.
        """
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(each) for each in prompt or ()]
        # No timeout: a completion may take long, and the actor's deadline ends the rollout.
        async with httpx.AsyncClient(timeout=None) as http:
            answer = await http.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={"model": ctx.model, "messages": messages},
            )
        is_answered = answer.status_code == httpx.codes.OK
        return vf.ProgramResult(
            exit_code=0 if is_answered else 1,
            stdout="",
            stderr="" if is_answered else answer.text,
        )
