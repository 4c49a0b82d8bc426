"""Chat templates are rendered as transformers renders them."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers.utils import chat_template_utils

from mage_async.errors import PolicyError
from mage_async.inference.chat_files import DATE, load_chat
from mage_async.trials.action_parser import ActionParser
from mage_async.trials.allowed_tokens import action_tokens
from tests.helpers.random_models import SPACE_SCHEMES, save_spaced_chat, save_text_model

TEMPLATES = Path(__file__).parent / "chat_templates"
TOOL = {"type": "function", "function": {"name": "look", "description": "Look <é>."}}
LOOP = """\
{%- for message in messages -%}
{%- if message.role == "system" -%}{%- continue -%}{%- endif -%}
<{{ message.role }}>{{ message.content }}
{%- endfor -%}
{%- if tools -%}
{{ tools | tojson(ensure_ascii=False, separators=(",", ":"), sort_keys=True) }}
{{- tools | tojson(indent=1) }}{{ tools | tojson(ensure_ascii=True) }}
{%- endif -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""


def with_template(folder: Path, template: str) -> Path:
    save_text_model(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "template",
    [(TEMPLATES / "smollm3.jinja").read_text(), LOOP],
    ids=["a block of generation, as SmolLM3's", "a loop that continues, and options of tojson"],
)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["alone", "with tools"])
def test_a_template_is_rendered_as_transformers_renders_it(
    tmp_path: Path, template: str, tools: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: DATE))
    chat = load_chat(with_template(tmp_path, template))
    messages = [
        {"role": "user", "content": "The door"},
        {"role": "assistant", "content": "open"},
        {"role": "user", "content": "shut"},
    ]
    rendered: Any = chat_template_utils.render_jinja_template(
        [messages],
        tools=tools or None,
        chat_template=template,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert chat.decode(chat.prompt(messages, tools)) == rendered[0][0]


def test_a_prompt_does_not_depend_on_the_day(tmp_path: Path) -> None:
    dated = "<{{ strftime_now('%d %B %Y, %H:%M') }}>" + LOOP
    chat = load_chat(with_template(tmp_path, dated))
    assert chat.decode(chat.opening("door")).startswith("<26 July 2024, 00:00>")


def test_a_template_is_read_as_utf_8_in_any_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_text = Path.read_text

    def read(file: Path, encoding: str | None = None, **options: str) -> str:
        return read_text(file, encoding=encoding or "latin-1", **options)

    monkeypatch.setattr(Path, "read_text", read)
    chat = load_chat(with_template(tmp_path, "<｜User｜>{{ messages[0].content }}" + LOOP))
    assert chat.decode(chat.opening("door")).startswith("<｜User｜>door")


def test_a_template_that_is_no_utf_8_is_one_sentence(tmp_path: Path) -> None:
    (with_template(tmp_path, LOOP) / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(PolicyError, match=r"chat_template\.jinja: cannot be read as UTF-8"):
        load_chat(tmp_path)


def test_a_template_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_text = Path.read_text

    def read(file: Path, encoding: str | None = None) -> str:
        if file.name == "chat_template.jinja":  # root may read what has no permission
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return read_text(file, encoding=encoding)

    directory = with_template(tmp_path, LOOP)
    monkeypatch.setattr(Path, "read_text", read)
    with pytest.raises(PolicyError, match=r"chat_template\.jinja: cannot be read: Permission den"):
        load_chat(directory)


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    (save_text_model(tmp_path) / "chat_template.jinja").unlink()
    with pytest.raises(PolicyError, match=r"take the instruct model, or save a template"):
        load_chat(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = LOOP
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_chat(tmp_path).stop_tokens


def test_a_stop_token_may_have_the_id_0_and_there_must_be_one(tmp_path: Path) -> None:
    end = load_chat(save_text_model(tmp_path)).end_token
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["eos_token"] = {"lstrip": False}  # a table without a text
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = load_chat(tmp_path)
    assert (chat.stop_tokens, chat.end_token) == ((0, end), end), "the template writes it"
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PolicyError, match=r"no token ends a turn, .*: set eos_token_id of gen"):
        load_chat(tmp_path)


@pytest.mark.parametrize("ids", ["2", [0, None]])
def test_a_stop_token_that_is_no_number_is_refused(tmp_path: Path, ids: object) -> None:
    save_text_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(PolicyError, match=r"generation_config\.json: eos_token_id must be a whole"):
        load_chat(tmp_path)


REFUSING = """\
{%- for message in messages -%}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) -%}
{{ raise_exception("roles must alternate") }}
{%- endif -%}
<{{ message.role }}>{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""


def test_where_a_template_refuses_a_role_the_user_says_its_words(tmp_path: Path) -> None:
    chat = load_chat(with_template(tmp_path, REFUSING))
    messages = [{"role": role, "content": role} for role in ("system", "user", "tool")]
    assert chat.decode(chat.prompt(messages)) == "<user>system\n\nuser\n\ntool<assistant>"
    assert chat.decode(chat.continuation(-1, messages[2:])) == "<user>tool<assistant>"
    with pytest.raises(PolicyError, match="roles must alternate"):
        chat.prompt([{"role": "assistant", "content": "a"}])


def test_settings_of_an_earlier_batch_neither_cut_nor_pad_a_text(tmp_path: Path) -> None:
    save_text_model(tmp_path)
    file, text = tmp_path / "tokenizer.json", "The door is open"
    wanted = load_chat(tmp_path).encode(text)
    truncation = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0, "pad_type_id": 0}
    padding |= {"pad_token": "", "pad_to_multiple_of": None}
    saved = json.loads(file.read_text(encoding="utf-8"))
    saved |= {"truncation": truncation, "padding": padding}
    file.write_text(json.dumps(saved), encoding="utf-8")
    assert load_chat(tmp_path).encode(text) == wanted


def test_characters_that_a_vocabulary_lacks_are_no_special_tokens(tmp_path: Path) -> None:
    save_text_model(tmp_path)
    tokenizer = Tokenizer(BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_chat(tmp_path).encode_data("a\u00e9a") == (1, 0, 1)


@pytest.mark.parametrize("scheme", SPACE_SCHEMES)
@pytest.mark.parametrize("opening", ["", "<s>"], ids=["after a text", "after a special token"])
def test_the_parts_of_a_chat_have_the_ids_of_the_whole_string(
    tmp_path: Path, scheme: str, opening: str
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        f"{{% else %}}{opening}{{{{ m.content }}}}</s>{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    )
    tokenizer = save_spaced_chat(tmp_path, scheme, template)
    chat = load_chat(tmp_path)

    def whole(said: str) -> list[int]:
        turn = f"[INST] {said} [/INST]{opening}<action> 7</action></s>"
        return tokenizer.encode(2 * turn, add_special_tokens=False).ids

    action = [*action_tokens("7", chat, ActionParser("both"))]
    assert chat.decode(action) == " 7</action>"
    ids = [*chat.opening("a  b", "<action>"), *action]
    ids += [*chat.answer(-1, "", "a  b", "<action>"), *action]
    assert [*ids, chat.end_token] == whole("a  b")
    talk = [
        {"role": role, "content": content}
        for role, content in (("user", "a  b"), ("assistant", "<action> 7</action>"))
    ]
    assert chat.conversation(2 * talk)[0] == whole("a  b")
    # Text that holds a special token, here cut into four tokens, changes no id around it.
    held, plain = chat.opening("x</s>y"), chat.opening("xy")
    cut = plain.index(tokenizer.token_to_id("x")) + 1
    assert (held[:cut], held[cut + 4 :]) == (plain[:cut], plain[cut:])
