"""Read a model directory's tokenizer and chat template into a `ChatFormat`; refuse a model that has
none.

transformers is not imported, which saves an actor 3 s. As transformers does, `tokenizers` reads
tokenizer.json, and jinja2 renders the template in its sandbox, with the same tags and filters.
`mage_async/trials/chat_format.py` turns messages into tokens with what is read here.
"""

import json
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from mage_async.errors import PolicyError
from mage_async.policy.model_files import read_json
from mage_async.trials.chat_format import ChatFormat, Message, Render, Tokenize, Tokens, Tools

CHAT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
"""Names of the files of a tokenizer and its chat template in a model directory."""
DATE = datetime(2024, 7, 26)
"""Date that every template reads as today's (SmolLM3's writes it into the system message). With the
date of the clock, a run resumed after midnight, a replay or a later evaluation would get other
prompts than before. Llama 3's templates use this date if no clock is available.
"""


def load_chat(directory: Path, *, thinking: bool = False) -> ChatFormat:
    """Read the chat format of a model directory.

    Args:
        thinking: Value of `enable_thinking` in the template.

    Raises:
        PolicyError: there is no tokenizer.json, no token that ends a turn or no chat template, a
            file is damaged, or the template cannot be used.
    """
    tokenizer = _tokenizer(directory)
    settings = read_json(directory / "tokenizer_config.json")
    stop_tokens = _stop_tokens(directory, tokenizer, settings)

    inner = _without_prefix(tokenizer)

    def decode(ids: Sequence[int]) -> str:
        return inner.decode(list(ids), skip_special_tokens=False)

    template = _template(directory, settings)
    tokenize = _tokenize_function(tokenizer, inner, _special_tokens(tokenizer, template))
    render = _render_function(template, settings, thinking)
    return ChatFormat(tokenize, decode, render, stop_tokens, tokenizer_file=tokenizer.to_str)


def _tokenizer(directory: Path) -> Tokenizer:
    """Read a directory's `tokenizer.json`."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise PolicyError(
            f"{directory}: no tokenizer.json; save one with AutoTokenizer(...).save_pretrained(...)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise PolicyError(
            f"{file}: cannot be read as a tokenizer: {error}; copy the file again"
        ) from error
    # A file keeps the settings of the last batch that was tokenized before it was saved.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_prefix(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer for text that follows other text: it adds no space before the text, which
    the tokenizers of Llama 2 and Mistral do, and removes none when it decodes. A tokenizer that
    adds no space is returned itself.
    """
    whole = json.loads(tokenizer.to_str())
    changed = whole | {
        part: _part_without_prefix(whole[part]) for part in ("normalizer", "pre_tokenizer")
    }
    if changed == whole:
        return tokenizer
    changed["decoder"] = _part_without_prefix(whole["decoder"])
    return Tokenizer.from_str(json.dumps(changed))


def _part_without_prefix(part: Any) -> Any:
    """Return a part of a tokenizer.json that neither adds nor removes a space before a text."""
    # A normalizer of the type Strip has no content: it removes white space, not the added space.
    if part is None or part["type"] == "Prepend" or (part["type"] == "Strip" and "content" in part):
        return None
    changed = {
        key: [own for each in value if (own := _part_without_prefix(each))]
        if key in ("normalizers", "pretokenizers", "decoders")
        else value
        for key, value in part.items()
    }
    off = {"prepend_scheme": "never", "add_prefix_space": False}
    return changed | {key: value for key, value in off.items() if key in part}


def _tokenize_function(
    tokenizer: Tokenizer, inner: Tokenizer, special: Collection[int]
) -> Tokenize:
    """Return the function that tokenizes a text, and finds the spans of special tokens in it.

    Args:
        inner: tokenizer of a text that follows other text (`_without_prefix`).
    """
    added = tokenizer.get_added_tokens_decoder()

    def tokenize(text: str) -> Tokens:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids = first = tuple(encoding.ids)
        if inner is not tokenizer:
            # Only the text before the first added token follows other text.
            place = next((n for n, token in enumerate(first) if token in added), len(first))
            span = encoding.token_to_chars(place)
            before = text if span is None else text[: span[0]]
            ids = (*inner.encode(before, add_special_tokens=False).ids, *first[place:])
        places = (place for place, token in enumerate(encoding.ids) if token in special)
        spans = map(encoding.token_to_chars, places)
        # A character that the vocabulary lacks becomes the token of unknown texts, which is
        # special; it holds no text that could be cut.
        found = tuple(span for span in spans if span is not None and span[1] - span[0] > 1)
        return Tokens(ids, found, first)

    return tokenize


def _special_tokens(tokenizer: Tokenizer, template: str) -> frozenset[int]:
    """Return the ids that only the template may write: special and added tokens that it contains.

    Qwen3's `<tool_call>` and `<think>` are added tokens, but not marked as special. Tokens of one
    character are left out: `chat_format.encode_as_data` keeps text from becoming a special token by
    cutting the text inside it, which needs two characters.
    """
    added = tokenizer.get_added_tokens_decoder().items()
    return frozenset(
        number
        for number, token in added
        if len(token.content) > 1 and (token.special or token.content in template)
    )


def _template(directory: Path, settings: dict[str, Any]) -> str:
    """Return the text of a directory's chat template; of several, the one named "default"."""
    file = directory / "chat_template.jinja"
    try:
        template = (
            file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
        )
    except OSError as error:
        raise PolicyError(f"{file}: cannot be read: {error.strerror}; copy it again") from error
    except ValueError as error:
        raise PolicyError(
            f"{file}: cannot be read as UTF-8: {error}; copy the file again"
        ) from error
    if isinstance(template, list):
        tables = [each for each in template if isinstance(each, dict)]
        named = {str(each.get("name")): each.get("template") for each in tables}
        if (template := named.get("default")) is None:
            raise PolicyError(
                f"{directory / 'tokenizer_config.json'}: of its chat templates "
                f"({', '.join(named)}) none is named default: save the one to be used as "
                "chat_template.jinja"
            )
    if not isinstance(template, str):
        raise PolicyError(
            f"{directory}: has no chat template (a base model has none): take the instruct model, "
            "or save a template as chat_template.jinja"
        )
    return template


class _GenerationBlock(Extension):
    """Render `{% generation %}` ... `{% endgeneration %}` as the text inside.

    Templates such as SmolLM3's mark the assistant's text with such a block.
    """

    # jinja2 declares `tags` as a variable of instances.
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the node of a block; as in transformers, variables set in it end with it."""
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(inside, lineno=line)


def _render_function(template: str, settings: dict[str, Any], thinking: bool) -> Render:
    """Return the function that renders messages by a template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = DATE.strftime
    try:
        compiled = environment.from_string(template)
    except TemplateError as error:
        raise PolicyError(
            f"the chat template cannot be read: {error}; mend it in chat_template.jinja, or take "
            "that of the model's publisher"
        ) from error
    # Templates read the special tokens by these names.
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    specials = {name: _token_text(settings.get(name)) for name in names}

    def render(messages: list[Message], opens_turn: bool, tools: Tools) -> str:
        """Render messages; raise a `PolicyError` if the template refuses them."""
        try:
            return compiled.render(
                messages=messages,
                add_generation_prompt=opens_turn,
                enable_thinking=thinking,
                tools=list(tools) or None,
                **specials,
            )
        # A template computes with the values of a program's request, and raises these exceptions if
        # one has another type, such as a tool's description that is a number.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise PolicyError(f"the chat template refuses the conversation: {error}") from error

    return render


def _as_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    """Write JSON as the filter `tojson` of transformers does: HTML characters are not escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    """Raise the error with which a template refuses its messages."""
    raise TemplateError(message)


def _token_text(token: Any) -> str:
    """Return the text of a special token, which is a string or a table with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text or ""


def _stop_tokens(directory: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> list[int]:
    """Return the ids that end a turn, ascending: those of generation_config.json, or else of
    config.json, and the tokenizer's `eos_token`.

    Raises:
        PolicyError: a file is damaged, or no file names such a token.
    """
    file = directory / "generation_config.json"
    ends = read_json(file).get("eos_token_id")
    if ends is None:  # 0 is an id
        file = directory / "config.json"
        ends = read_json(file).get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(each, int) for each in ids):
        raise PolicyError(
            f"{file}: eos_token_id must be a whole number, or a list of some, got {ends!r}"
        )
    own = tokenizer.token_to_id(_token_text(settings.get("eos_token")))
    if not ids and own is None:
        raise PolicyError(
            f"{directory}: no token ends a turn, so each answer would be cut at its longest: set "
            "eos_token_id of generation_config.json to the token with which the chat template ends "
            "an answer"
        )
    return sorted({*ids, *([] if own is None else [own])})
