"""Rows of chats and pairs: tools reach the chat template, and every answer has a loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenstep.data import ChatEncoder, Corpus, write_token_file
from evenstep.errors import InputError
from tests.data import corpora

MARKED = (
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
USER, YES, NO = (
    {"role": role, "content": content}
    for role, content in (("user", "rain?"), ("assistant", "yes"), ("assistant", "no"))
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"properties": {"zone": {"type": "integer"}}}},
}


def tokenizer_of(folder: Path, template: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(corpora.tokenizer(folder / "tokenizer"))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "tokenizer")
    return tokenizer


def ids_of(tokenizer: Any, messages: list[Any], tools: Any) -> list[int]:
    encoded = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True)
    return list(encoded["input_ids"])


def said(sample: Any, tokenizer: Any) -> str:
    """What counts in the loss."""
    answer = sample["input_ids"][sample["loss_mask"] == 1]
    return "".join(tokenizer.convert_ids_to_tokens(answer))


def rows_file(folder: Path, *rows: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
@pytest.mark.parametrize("as_json", [False, True])
def test_tools_of_a_row_reach_the_chat_template(
    tmp_path: Path, template: str, as_json: bool
) -> None:
    tokenizer = tokenizer_of(tmp_path, template)
    given = [[WEATHER, CLOCK], None, []]
    rows = [
        {"messages": [USER, YES], "tools": json.dumps(tools) if as_json else tools}
        for tools in given
    ]
    corpus = Corpus(
        paths=rows_file(tmp_path, *rows, {"messages": [USER, YES]}),
        format="chat",
        tokenizer=str(tmp_path / "tokenizer"),
    )
    stored = corpus.stored(tmp_path / "chats.tokens")
    for number, tools in enumerate([*given, None]):
        expected = ids_of(tokenizer, [USER, YES], tools or None)
        assert stored[number]["input_ids"].tolist() == expected
        assert said(stored[number], tokenizer) == "yes"
    lengths = [len(stored[number]["input_ids"]) for number in range(4)]
    assert corpus.token_counts(workers=1).tolist() == lengths
    assert lengths[0] > lengths[1] == lengths[2] == lengths[3]


def test_tools_in_columns_have_no_keys_of_other_rows(tmp_path: Path) -> None:
    from datasets import Dataset

    tokenizer = tokenizer_of(tmp_path, MARKED)
    rows = [{"messages": [USER, YES], "tools": [tool]} for tool in (WEATHER, CLOCK)]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "rows"))
    folder = str(tmp_path / "tokenizer")
    corpus = Corpus(paths=str(tmp_path / "rows"), format="chat", tokenizer=folder)
    stored = corpus.stored(tmp_path / "chats.tokens")
    for number, row in enumerate(rows):
        expected = ids_of(tokenizer, [USER, YES], row["tools"])
        assert stored[number]["input_ids"].tolist() == expected


def test_other_options_of_a_row_reach_the_chat_template(tmp_path: Path) -> None:
    template = "{% if thinking %}<think>{% endif %}" + UNMARKED
    tokenizer = tokenizer_of(tmp_path, template)
    rows = [
        {"messages": [USER, YES], "chat_template_kwargs": {"thinking": True}},
        {"messages": [USER, YES], "chat_template_kwargs": {"thinking": False}},
        {"messages": [USER, YES]},
        {"messages": [USER, YES], "chat_template_kwargs": {"effort": 1}},
    ]
    folder = str(tmp_path / "tokenizer")
    corpus = Corpus(paths=rows_file(tmp_path, *rows[:3]), format="chat", tokenizer=folder)
    stored = corpus.stored(tmp_path / "chats.tokens")
    said_by = ["".join(tokenizer.convert_ids_to_tokens(stored[n]["input_ids"])) for n in range(3)]
    assert [each.startswith("<think>") for each in said_by] == [True, False, False]
    corpus = Corpus(paths=rows_file(tmp_path, *rows), format="chat", tokenizer=folder)
    with pytest.raises(InputError, match="line 4: a chat has 'effort', but no chat template"):
        corpus.stored(tmp_path / "chats.tokens")


def test_both_chats_of_a_pair_have_its_tools(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, UNMARKED)
    begin = [USER, YES, USER]
    row = {"prompt": begin, "chosen": [YES], "rejected": [NO], "tools": [CLOCK]}
    folder = str(tmp_path / "tokenizer")
    corpus = Corpus(paths=rows_file(tmp_path, row), format="pairs", tokenizer=folder)
    stored = corpus.stored(tmp_path / "pairs.tokens")
    for number, answer in enumerate((YES, NO)):
        expected = ids_of(tokenizer, [*begin, answer], [CLOCK])
        assert stored[number]["input_ids"].tolist() == expected
        assert said(stored[number], tokenizer) == answer["content"]


@pytest.mark.parametrize(
    ("template", "tools", "fault"),
    [
        (None, [CLOCK], "line 2: a chat has 'tools', but no chat template that reads"),
        ("{{ messages }}", [CLOCK], "line 2: a chat has 'tools', but no chat template that reads"),
        (MARKED, "clock", "line 2: 'tools' of a chat must be a list of JSON schemas"),
        (MARKED, CLOCK, "line 2: 'tools' of a chat must be a list of JSON schemas"),
        (MARKED, ["clock"], "line 2: 'tools' of a chat must be a list of JSON schemas"),
    ],
)
def test_tools_that_would_have_no_effect_are_refused(
    tmp_path: Path, template: str | None, tools: Any, fault: str
) -> None:
    chat = [USER, YES]
    path = rows_file(tmp_path, {"messages": chat}, {"messages": chat, "tools": tools})
    if template is not None:
        tokenizer_of(tmp_path, template.replace("{{ messages }}", corpora_template()))
    folder = None if template is None else str(tmp_path / "tokenizer")
    with pytest.raises(InputError, match=fault):
        Corpus(paths=path, format="chat", tokenizer=folder).stored(tmp_path / "chats.tokens")


def corpora_template() -> str:
    """A template that knows no tools."""
    return UNMARKED.partition("{% endif %}")[2]


def test_samples_that_were_stored_without_tools_are_stored_again(tmp_path: Path) -> None:
    corpus = Corpus(paths=rows_file(tmp_path, {"messages": [USER, YES]}), format="chat")
    path = tmp_path / "chats.tokens"
    before = corpus.stored(path).fingerprint
    key = json.loads(path.with_suffix(".json").read_text())
    del key["options"]["tools"]
    path.with_suffix(".json").write_text(json.dumps(key, indent=1))
    written = path.stat().st_mtime_ns
    assert corpus.stored(path).fingerprint == before
    assert path.stat().st_mtime_ns > written


def test_the_encoder_takes_tools(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, MARKED)
    sample = ChatEncoder(tokenizer).encode([USER, YES], tools=[CLOCK])
    assert sample["input_ids"].tolist() == ids_of(tokenizer, [USER, YES], [CLOCK])


def without(message: dict[str, Any], weight: object = 0) -> dict[str, Any]:
    return {**message, "weight": weight}


@pytest.mark.parametrize("template", [None, MARKED, UNMARKED])
@pytest.mark.parametrize("zero", [0, False, 0.0])
def test_messages_of_weight_0_do_not_count_in_the_loss(
    tmp_path: Path, template: str | None, zero: object
) -> None:
    chat = [USER, YES, USER, NO, USER, YES]
    weighted = [USER, without(YES, 1), without(USER), without(NO, zero), USER, without(YES, None)]
    tokenizer = None if template is None else tokenizer_of(tmp_path, template)
    encoder = ChatEncoder(tokenizer)
    whole, sample = encoder.encode(chat), encoder.encode(weighted)
    assert sample["input_ids"].tolist() == whole["input_ids"].tolist()
    # Naively: of three runs of ones, the second one is 0.
    mask = whole["loss_mask"]
    starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    expected = np.where((np.cumsum(np.isin(np.arange(len(mask)), starts)) == 2), 0, mask)
    assert sample["loss_mask"].tolist() == expected.tolist() != mask.tolist()


@pytest.mark.parametrize("weight", [0.5, 2, -1, "0", [0]])
@pytest.mark.parametrize("masked", [True, False])
def test_other_weights_of_messages_are_refused(weight: object, masked: bool) -> None:
    with pytest.raises(InputError, match="'weight' of a message must be 0 or 1"):
        ChatEncoder().encode([USER, without(YES, weight)], masked)


def test_a_template_that_hides_where_a_message_of_weight_0_ends_is_refused(tmp_path: Path) -> None:
    template = MARKED.replace("<{{ m['role'] }}>", "<{{ m['role'] }}{{ messages | length }}>")
    encoder = ChatEncoder(tokenizer_of(tmp_path, template))
    with pytest.raises(InputError, match=r"changes earlier messages.*Remove its weight"):
        encoder.encode([USER, without(YES), USER, NO])


def test_chats_that_were_stored_without_weights_are_stored_again(tmp_path: Path) -> None:
    corpus = Corpus(paths=rows_file(tmp_path, {"messages": [USER, YES]}), format="chat")
    path = tmp_path / "chats.tokens"
    corpus.stored(path)
    key = json.loads(path.with_suffix(".json").read_text())
    del key["options"]["weights"]
    path.with_suffix(".json").write_text(json.dumps(key, indent=1))
    written = path.stat().st_mtime_ns
    corpus.stored(path)
    assert path.stat().st_mtime_ns > written


CALLS = [{"type": "function", "function": {"name": "clock", "arguments": {"zone": 1}}}]


@pytest.mark.parametrize("template", [None, MARKED])
@pytest.mark.parametrize("format", ["chat", "pairs"])
def test_tool_calls_that_no_template_reads_are_refused(
    tmp_path: Path, template: str | None, format: Any
) -> None:
    calling = {**YES, "content": "", "tool_calls": CALLS}
    row = {"messages": [USER, calling], "chosen": [USER, calling], "rejected": [USER, NO]}
    if template is not None:
        tokenizer_of(tmp_path, template)
    folder = None if template is None else str(tmp_path / "tokenizer")
    corpus = Corpus(paths=rows_file(tmp_path, row), format=format, tokenizer=folder)
    with pytest.raises(InputError, match="a chat has 'tool_calls', but no chat template"):
        corpus.stored(tmp_path / "chats.tokens")


def test_messages_in_columns_have_no_keys_of_other_messages(tmp_path: Path) -> None:
    from datasets import Dataset

    calls = "{% if 'tool_calls' in m %}{{ m['tool_calls'] | tojson }}{% endif %}"
    tokenizer_of(tmp_path, MARKED.replace("{% if m['role']", f"{calls}{{% if m['role']"))
    calling, folder = {**YES, "tool_calls": CALLS}, str(tmp_path / "tokenizer")
    rows = [
        {"messages": [USER, calling], "chosen": [USER, calling], "rejected": [USER, NO]},
        {"messages": [USER, YES], "chosen": [USER, YES], "rejected": [USER, NO]},
    ]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "columns"))
    for kind in ("chat", "pairs"):
        stored = [
            Corpus(paths=path, format=kind, tokenizer=folder).stored(tmp_path / f"{kind}{name}")
            for name, path in enumerate((str(tmp_path / "columns"), rows_file(tmp_path, *rows)))
        ]
        assert stored[0].fingerprint == stored[1].fingerprint


@pytest.mark.parametrize("name", ["chosen", "rejected"])
@pytest.mark.parametrize("shorter", [[USER, YES], [USER], [USER, YES, USER]])
def test_a_pair_with_an_answer_without_loss_is_refused(
    tmp_path: Path, name: str, shorter: list[dict[str, str]]
) -> None:
    other = "rejected" if name == "chosen" else "chosen"
    good = {"prompt": "rain?", "chosen": "yes", "rejected": "no"}
    row = {name: shorter, other: [USER, YES, {"role": "user", "content": "sure?"}, NO]}
    corpus = Corpus(paths=rows_file(tmp_path, good, row), format="pairs")
    fault = f"rows.jsonl, line 2: no token of the {name} chat counts in the loss.*remove the pair"
    with pytest.raises(InputError, match=fault):
        corpus.stored(tmp_path / "pairs.tokens")


def test_a_corpus_names_the_row_of_a_negative_token(tmp_path: Path) -> None:
    path = rows_file(tmp_path, *({"input_ids": ids} for ids in ([1], [], [2, 3], [4, -7])))
    with pytest.raises(InputError, match=r"sample 3: .*has -7 in 'input_ids', but token ids begin"):
        Corpus(paths=path).stored(tmp_path / "rows.tokens")


def test_a_token_file_of_signed_tokens_refuses_negative_ones(tmp_path: Path) -> None:
    tokens = [np.array([1, 2], np.int8), np.array([3, -1], np.int8)]
    with pytest.raises(InputError, match="sample 1 has -1 in 'input_ids', but token ids begin"):
        write_token_file(tmp_path / "a.tokens", tokens)
