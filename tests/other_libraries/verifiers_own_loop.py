"""Verifiers' own loop over its own client, with a scripted endpoint; runs in verifiers' own Python.

    python verifiers_own_loop.py '{"tasks": [3, 4], "guesses": ["10", …]}'

Prints what every task's rollout said and earned, as JSON.
"""

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHILD = HERE.parents[1] / "services" / "mage_services" / "verifiers" / "child"
sys.path += [str(HERE), str(CHILD)]

import verifiers.v1 as vf  # noqa: E402
from rollout_worker import environment_of  # noqa: E402


def main() -> None:
    given = json.loads(sys.argv[1])
    said: list[str] = []

    class Scripted(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answered = sum(each["role"] == "assistant" for each in body["messages"])
            said.append(body["messages"][-1]["content"])
            message = {"role": "assistant", "content": given["guesses"][answered]}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            head = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
            answer = json.dumps({**head, "choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = vf.EvalClientConfig(
        base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key_var="MAGE_ASYNC_NO_KEY"
    )

    async def play() -> list[dict]:
        environment = environment_of({"taskset": "number_taskset", "environment": {}})
        tasks, played = list(environment.taskset), []
        context = vf.ModelContext(model="m", client=client, sampling=vf.SamplingConfig())
        async with environment.serving():
            for index in given["tasks"]:
                said.clear()
                episode = await environment.run_episode(tasks[index], context)
                played.append({"said": list(said), "reward": episode.traces[0].reward})
        return played

    print(json.dumps(asyncio.run(play())))


if __name__ == "__main__":
    main()
