"""The server, driven by real requests: every page, strangers, faults, and runs that go on."""

import asyncio
import re
import shutil
import socket
import time
import urllib.request
from html.parser import HTMLParser
from urllib.parse import urljoin

import pytest

from mage_services.cli.main import main
from mage_services.processes import cores_and_memory
from mage_services.processes.child_process import ChildProcess
from mage_services.view import server as server_module
from mage_services.view import trial_pages
from mage_services.view.index import RunReader
from mage_services.view.page_request import PageRequest
from tests.helpers.recorded_runs import unpack
from tests.view.conftest import build, shown

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e<img src=x onerror=alert(1)>"
VOID = {"meta", "br", "hr", "link", "input", "base"}


class Checker(HTMLParser):
    """Collects elements and where links lead; fails where an element is not closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.links, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.links += [value for name, value in attrs if name in ("href", "src", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def checked(text):
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    return checker


@pytest.fixture(scope="module")
def place(server, finished):
    """A group of step 2 and its run's address, once the index has it."""
    server.until("runs/finished/step/2", "group/")
    with RunReader(finished) as reader:
        return f"runs/finished/group/{reader.groups_of(2)[0].number}"


def test_from_the_curve_to_the_tokens_of_a_turn_is_three_links(server, place):
    overview = server.page("runs/finished/")
    assert 'href="runs/finished/step/2"' in overview
    assert f'href="{place}"' in server.page("runs/finished/step/2")
    assert f'href="{place}/trial/0/turn/3"' in server.page(place)
    turn = server.until(f"{place}/trial/0/turn/3", "<h3>advantage</h3>")
    assert "log-prob" in turn
    assert "staleness" in turn


def test_every_page_is_whole_and_reaches_for_nothing_outside(server, place):
    pages = [
        "",
        "step/1",
        "step/4?episode=1",
        "trials",
        "evaluation",
        "processes",
        "config",
        "play",
    ]
    for path in [
        *(f"runs/finished/{page}" for page in pages),
        "",
        place,
        f"{place}/trial/1/turn/0",
    ]:
        found = checked(server.page(path))
        outside = [link for link in found.links if "//" in link]
        assert outside == [], path
        assert found.tags.count("script") == 1
        assert not any(name.startswith("on") for name in found.attributes)


def test_a_proxy_may_show_every_page_below_a_prefix_of_its_own(server, place):
    shown_at = f"http://hub/user/x/{server.address.split('/', 3)[3]}"
    for path in ("", "runs/finished/play", f"{place}/trial/1/turn/0", "runs/a%2Fb/"):
        base, *links = checked(server.get(path)[1]).links
        root = urljoin(f"{shown_at}{path}", base)
        assert root == shown_at, path
        assert all(urljoin(root, link).startswith(root) for link in links), path


def test_every_link_of_a_page_leads_to_a_page(server, place):
    seen = set()
    for path in ("runs/finished/", "runs/finished/step/2", place, f"{place}/trial/0/turn/0"):
        seen |= {link for link in checked(server.page(path)).links if not link.startswith("../")}
    for link in sorted(seen)[:120]:
        status, text, _ = server.get(link.removeprefix("./"))
        assert status == 200, (link, text)


def test_returns_and_advantages_come_when_they_are_computed(server, place):
    turn = f"{place}/trial/0/turn/0"
    server.until(turn, r'advantage</h3><p class="big \w+"><b>[+−]?[0-9.]+</b>')
    assert "are being computed" not in server.page(turn)


def test_bins_narrow_the_list_and_the_choice_is_in_the_address(server, place):
    page = server.page("runs/finished/step/2")
    bins = re.findall(r'href="(runs/finished/step/2\?[^"]*bin=(\d+)[^"]*)" class="bin', page)
    counts = [int(n) for n in re.findall(r"<title>[^<]*: (\d+) of 12 trials</title>", page)]
    assert sum(counts) == 12
    assert len(bins) == len(counts)
    for (address, _), count in zip(bins, counts, strict=True):
        narrowed = server.page(address.replace("&amp;", "&"))
        assert narrowed.count('title="trial ') == count


def test_text_is_found_whatever_its_case(server, place):
    found = server.page("runs/finished/trials?text=EPISODE")
    assert "<mark>episode</mark>" in found
    assert "<mark>" not in server.page("runs/finished/trials?text=zebra")
    hostile = server.page("runs/finished/trials?text=%3Cscript%3Ealert(1)%3C/script%3E")
    assert "<script>alert" not in hostile


def test_a_search_that_has_read_the_newest_trials_leads_to_older_ones(
    server, finished, place, monkeypatch
):
    monkeypatch.setattr(trial_pages, "MAX_CONSIDERED", 20)
    monkeypatch.setattr(trial_pages, "PART_S", 60.0)

    def note(**query):
        given = {"text": "zebra"} | query
        request = PageRequest("/", {"finished": finished}, "finished", {}, given, None)
        return re.search(r"found in .*", trial_pages.trials(request))[0]

    # Four steps of 12 trials: the newest 20 are those of step 4, and some of step 3.
    assert re.search('20 trials read. <a href="[^"]*first=1&amp;last=3&amp;text=zebra"', note())
    assert "12 trials read, which is all of them" in note(last="1")
    monkeypatch.setattr(trial_pages, "MAX_CONSIDERED", 24)
    assert "24 trials read, which is all of them" in note(last="2")


def test_strangers_are_refused(server):
    own, token = server.address, server.address.split("/")[3]
    root = f"http://{server.host}/"
    assert server.get(address=root)[0] == 403
    assert server.get(address=f"{root}{token[:-1]}x/")[0] == 403
    for headers in (
        {"Host": "evil.example"},
        {"Host": f"evil.example:{server.host.split(':')[1]}"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        status, text, _ = server.get(address=own, headers=headers)
        assert status == 403, headers
        assert token not in text
    assert (
        server.get(address=own, headers={"Host": server.host.replace("127.0.0.1", "localhost")})[0]
        == 200
    )


def test_every_answer_says_what_a_browser_may_do(server):
    for path in ("", "runs/finished/", "runs/nowhere/", "static/view.js", "static/nothing"):
        _, _, headers = server.get(path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "same-origin"


def test_what_cannot_be_shown_is_one_sentence(server, place):
    for path, said in {
        "runs/nowhere/": "there is no run 'nowhere'",
        "runs/finished/step/99": "there is no step 99 yet; the newest is 4",
        "runs/finished/group/99999": "group 99999 is not in the index",
        f"{place}/trial/0/turn/999": "has 12 turns",
        f"{place}/trial/77/turn/0": "trial 77 of group",
        "runs/finished/trials?first=x": "first is a whole number",
        "runs/finished/config?other=x": "there is no run &#39;x&#39; here",
        "runs/finished/nonsense": "Nothing is at this address",
        "runs/damaged/": "config.toml",
        "runs/strange/": "lacks &#39;return_by_episode&#39;",
    }.items():
        status, text, _ = server.get(path)
        assert status in (404, 410), path
        assert said in text.replace("&#39;nowhere&#39;", "'nowhere'"), (path, text)
        assert "Traceback" not in text


def test_a_mistake_of_the_server_is_not_taken_for_a_damaged_run(monkeypatch):
    monkeypatch.setattr(server_module, "refusal", lambda *_: "")

    async def mistaken(_):
        return {}["nowhere"]

    guard = server_module.Server(None, None, "token")._guard
    with pytest.raises(KeyError, match="nowhere"):
        asyncio.run(guard(None, mistaken))


def test_only_files_of_ours_are_served(server):
    for name in ("view.js", "view.css", "style.css", "icon.svg"):
        assert server.get(f"static/{name}")[0] == 200
    for name in ("..%2fserver.py", "%2e%2e%2fserver.py", "run.html", "/etc/passwd"):
        assert server.get(f"static/{name}")[0] in (403, 404)


def test_hostile_text_is_shown_as_text(tmp_path):
    run = unpack("finished", tmp_path)
    run.events.write_text("")
    (run.logs / "learner.log").write_text(HOSTILE)
    with shown(tmp_path) as server:
        page = server.page("runs/finished/processes")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;␛[2J⟨U+202E⟩&lt;img" in page
    assert "<script>alert" not in page
    assert "\x1b" not in page


def test_a_new_step_is_told_and_shown(tmp_path):
    run = unpack("finished", tmp_path)
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:3]))
    build(run)
    with shown(run.root) as server:
        assert "finished" in server.page("runs/finished/")
        request = urllib.request.Request(f"{server.address}events?run=finished")
        with urllib.request.urlopen(request, timeout=60) as events:
            assert events.readline() == b": here\n"
            began = time.monotonic()
            run.metrics.write_text("".join(lines))
            while b"changed" not in events.readline():
                pass
            server.until("runs/finished/", "batch of step 4")
            assert time.monotonic() - began < 60  # 2 s where a machine does nothing else


def test_a_change_between_the_making_of_a_page_and_its_listening_is_told_at_once(tmp_path):
    run = unpack("finished", tmp_path)
    with shown(run.root) as server:
        page = server.page("runs/finished/")
        server.until("runs/finished/", "batch of step 4")  # the index was built, a change
        before = re.search(r'data-change="(\d+)"', page)[1]
        address = f"{server.address}events?run=finished&after={before}"
        with urllib.request.urlopen(address, timeout=60) as events:
            heard = [events.readline() for _ in range(3)]
        assert heard == [b": here\n", b"\n", b"data: changed\n"]


def test_a_run_that_is_deleted_while_looked_at_is_said_to_be(tmp_path):
    run = unpack("finished", tmp_path)
    with shown(tmp_path) as server:
        server.page("runs/finished/")
        # Renamed, not removed file by file: the index is being written into the folder.
        run.root.rename(tmp_path.with_name(f"{tmp_path.name}_deleted"))
        status, text, _ = server.get("runs/finished/")
        assert status in (404, 410)
        assert "Traceback" not in text
        assert "No run is here yet" in server.until("", "No run is here yet")


def test_runs_whose_paths_look_alike_have_pages_of_their_own(tmp_path):
    recorded = unpack("finished", tmp_path / "others").config.read_text()
    paths = {"a/b": 11, "a~b": 12, "a%7Eb": 13, "a%2Fb": 14}
    for path, seed in paths.items():
        (tmp_path / "runs" / path).mkdir(parents=True)
        config = re.sub(r"(?m)^seed = \d+", f"seed = {seed}", recorded)
        (tmp_path / "runs" / path / "config.toml").write_text(config)
    with shown(tmp_path / "runs") as server:
        links = sorted(set(re.findall(r'href="(runs/[^"]+/)"', server.page(""))))
        assert len(links) == len(paths)
        seeds = {int(re.search(r"seed\D+?(\d+)", server.page(link))[1]) for link in links}
    assert seeds == set(paths.values())


def test_runs_of_different_environments_are_drawn_in_charts_of_their_own(tmp_path):
    runs = [unpack("finished", tmp_path / name) for name in ("one", "two", "three")]
    for run, environment in zip(runs, ("rps", "rps", "kuhn"), strict=True):
        text = re.sub(r'(?m)^name = "rps"', f'name = "{environment}"', run.config.read_text())
        run.config.write_text(text)
    with shown(tmp_path) as server:
        page = server.page("")
    assert sorted(re.findall(r"<figcaption>([^<]*)</figcaption>", page)) == ["kuhn", "rps"]


def test_a_copy_without_its_tokenizer_shows_numbers_and_says_why(tmp_path):
    run = unpack("finished", tmp_path)
    shutil.rmtree(run.policy)
    build(run)
    with RunReader(run) as reader:
        group = reader.groups_of(2)[0].number
    with shown(run.root) as server:
        for place in ("", "/trial/0/turn/0"):
            page = server.page(f"runs/finished/group/{group}{place}")
            assert "Tokens are shown by their numbers" in page
            assert re.search(r"⟨\d+⟩", page)
        status, text, _ = server.get("runs/finished/trials?text=rock")
        assert (status, "text cannot be searched" in text) == (404, True)


def test_a_port_in_use_and_a_folder_that_is_none_are_a_sentence(tmp_path, monkeypatch, capsys):
    # It would lower the priority of the tests.
    monkeypatch.setattr(cores_and_memory, "lower_priority", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for folder, said in (
            (tmp_path, f"port {port} of 127.0.0.1 is in use"),
            (tmp_path / "no", "no such folder of runs"),
        ):
            assert main(["view", str(folder), "--port", port]) == 2
            errors = capsys.readouterr().err
            assert said in errors
            assert errors.count("\n") == 1


@pytest.mark.parametrize("number", [0, 1])
def test_where_a_child_cannot_start_nothing_is_left_open(tmp_path, monkeypatch, number):
    start, started = ChildProcess.start, []

    async def start_some(*given):
        if len(started) == number:
            raise OSError("no more processes")
        started.append(await start(*given))
        return started[-1]

    monkeypatch.setattr(ChildProcess, "start", start_some)
    with socket.create_server((server_module.HOST, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(OSError, match="no more processes"):
        asyncio.run(server_module.serve(tmp_path, port, print))
    assert [each.is_running for each in started] == [False] * number
    server_module.bound_socket(port).close()
