"""A person plays in the page, and watches the agent: with a real policy in a process of its own."""

import re
import urllib.parse

import pytest

from tests.helpers.recorded_runs import unpack
from tests.view.conftest import shown

pytestmark = pytest.mark.slow


def post(server, path, **fields):
    """Send a form as a page of ours does; where it leads."""
    data = urllib.parse.urlencode(fields).encode()
    status, text, _ = server.get(path, data=data, headers={"Origin": f"http://{server.host}"})
    assert status == 200, text
    return text


def test_a_person_plays_a_trial_and_then_the_agent_does(tmp_path):
    unpack("finished", tmp_path)
    with shown(tmp_path) as server:
        page = post(server, "runs/finished/play", sit="1", seed="7")
        path = re.search(r"<b>trial (\d+)</b>", page)[1]
        path = f"runs/finished/play/{path}"
        for _ in range(12):
            server.until(path, 'value="rock"')
            post(server, path, answer="rock")
        page = server.until(path, "<b>the agent</b>")
        assert page.count('<span class="words">rock</span>') >= 12
        assert "hidden from you was" in page


def test_the_agent_is_watched_and_a_wrong_member_is_a_sentence(tmp_path):
    unpack("finished", tmp_path)
    with shown(tmp_path) as server:
        post(server, "runs/finished/play", watch="1")
        assert "episode 3" in server.until("runs/finished/play/1", "<b>the agent</b>")
        post(server, "runs/finished/play", watch="1", member="<b>nobody</b>")
        assert "&lt;b&gt;nobody" in server.until("runs/finished/play/2", "no member")
        status, text, _ = server.get("runs/finished/play/99")
        assert status == 404
        assert "there is no trial 99 any more" in text


def test_another_site_cannot_begin_a_trial(tmp_path):
    unpack("finished", tmp_path)
    with shown(tmp_path) as server:
        headers = {"Origin": "http://evil.example"}
        status, _, _ = server.get("runs/finished/play", data=b"sit=1", headers=headers)
        assert status == 403
        assert "Under way" not in server.page("runs/finished/play")
