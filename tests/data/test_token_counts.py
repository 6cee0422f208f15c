"""Numbers of tokens of a corpus: the same in every format, and for any number of workers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from evenstep.data import Corpus
from evenstep.errors import ConfigError, FileError, InputError
from tests.data import corpora
from tests.data.corpora import COUNTS, TEXTS, chat_of, tokens_of
from tests.data.megatron_files import write_pair
from tests.internals import corpus_module, default_workers, task_size

FULL = [count for count in COUNTS if count]
MAKERS: dict[str, Any] = {
    "text": (corpora.texts, {}),
    "jsonl": (lambda folder: corpora.jsonl(folder, "text", str), {}),
    "jsonl lists": (
        lambda folder: corpora.jsonl(folder, "ids", tokens_of),
        {"field": "ids"},
    ),
    "parquet": (lambda folder: corpora.parquet(folder, "body", str), {"field": "body"}),
    "parquet lists": (lambda folder: corpora.parquet(folder, "ids", tokens_of), {"field": "ids"}),
    "dataset": (lambda folder: corpora.dataset(folder, "text", str), {}),
    "dataset lists": (lambda folder: corpora.dataset(folder, "ids", tokens_of), {"field": "ids"}),
    "tokens": (corpora.token_file, {}),
    "megatron": (corpora.megatron, {}),
}
CHATS = {"jsonl": corpora.jsonl, "parquet": corpora.parquet, "dataset": corpora.dataset}


def made(kind: str, folder: Path) -> Corpus:
    make, options = MAKERS[kind]
    return Corpus(paths=str(make(folder)), **options)


@pytest.mark.parametrize("kind", MAKERS)
def test_every_format_of_the_same_texts_has_the_same_counts(kind: str, tmp_path: Path) -> None:
    corpus = made(kind, tmp_path)
    counts = corpus.token_counts(workers=1)
    assert counts.dtype == np.int64
    if kind in ("tokens", "megatron"):  # without the empty text
        assert counts.tolist() == FULL
    else:
        assert counts.tolist() == COUNTS


@pytest.mark.parametrize("kind", MAKERS)
def test_counts_are_those_of_the_samples_that_the_trainer_stores(kind: str, tmp_path: Path) -> None:
    stored = made(kind, tmp_path).stored(tmp_path / "stored")
    assert stored.lengths_of(np.arange(len(stored))).tolist() == FULL
    texts = [text for text in TEXTS if text]
    assert [bytes(stored[i]["input_ids"].tolist()).decode() for i in range(len(stored))] == texts


@pytest.mark.parametrize("kind", CHATS)
def test_chats_of_every_format_have_the_same_counts(kind: str, tmp_path: Path) -> None:
    path = CHATS[kind](tmp_path, "turns", chat_of)
    corpus = Corpus(paths=str(path), format="chat", field="turns")
    marks = len("<user>\n</user>\n<assistant>\n</assistant>\n")
    assert corpus.token_counts(workers=1).tolist() == [marks + 2 * count for count in COUNTS]


def test_several_processes_count_the_same_and_report_progress(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    sizes = [n * 37 % 101 for n in range(100)]
    path.write_text("".join(json.dumps({"text": "x" * size}) + "\n" for size in sizes))
    seen: list[tuple[int, int]] = []
    counts = Corpus(paths=str(path)).token_counts(
        workers=2, progress=lambda done, total: seen.append((done, total))
    )
    assert counts.tolist() == sizes
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (100, 100)


def test_a_fault_in_another_process_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' * 70 + '{"text": 3}\n')
    for workers in (1, 2):
        with pytest.raises(InputError, match=r"^\S*a.jsonl, line 71: field 'text' must be a str"):
            Corpus(paths=str(path)).token_counts(workers=workers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_any_number_of_processes_counts_every_format_alike(kind: str, tmp_path: Path) -> None:
    corpus = made(kind, tmp_path)
    one = corpus.token_counts(workers=1)
    for workers in (2, 3):
        assert (corpus.token_counts(workers=workers) == one).all()


def test_a_hugging_face_tokenizer_counts_what_it_makes(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from tests.data.test_text import word_level

    folder = str(tmp_path / "tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=word_level(), unk_token="[UNK]").save_pretrained(
        folder
    )
    corpus = Corpus(paths=str(corpora.jsonl(tmp_path, "text", str)), tokenizer=folder)
    assert corpus.token_counts(workers=1).tolist() == [len(text.split()) for text in TEXTS]


def test_both_files_of_megatron_and_folders_of_datasets_are_found(tmp_path: Path) -> None:
    (tmp_path / "pairs").mkdir()
    for name in ("a", "b"):
        write_pair(tmp_path / "pairs" / name, [[1, 2], [3]])
    for paths in ("pairs", "pairs/*", "pairs/*.bin", "pairs/?.idx"):
        found = Corpus(paths=str(tmp_path / paths)).token_counts()
        assert found.tolist() == [2, 1, 2, 1]
    (tmp_path / "sets").mkdir()
    for name in ("a", "b"):
        (tmp_path / "sets" / name).mkdir()
        corpora.dataset(tmp_path / "sets" / name, "text", str)
    found = Corpus(paths=str(tmp_path / "sets")).token_counts(workers=1)
    assert found.tolist() == COUNTS * 2


def test_a_changed_dataset_is_stored_again(tmp_path: Path) -> None:
    corpora.dataset(tmp_path, "text", str)
    corpus = Corpus(paths=str(tmp_path / "text-dataset"))
    stored = corpus.stored(tmp_path / "stored")
    before = stored.fingerprint
    assert corpus.stored(tmp_path / "stored").fingerprint == before
    corpora.dataset(tmp_path, "text", lambda text: text + "!")
    assert corpus.stored(tmp_path / "stored").fingerprint != before


def test_samples_are_stored_again_if_the_tokenizer_or_the_template_changed(tmp_path: Path) -> None:
    from tokenizers.pre_tokenizers import CharDelimiterSplit
    from transformers import PreTrainedTokenizerFast

    from tests.data.test_text import word_level

    folder, template = tmp_path / "tokenizer", tmp_path / "chat.jinja"
    fast = PreTrainedTokenizerFast(tokenizer_object=word_level(), unk_token="[UNK]")
    fast.save_pretrained(folder)
    template.write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    corpus = Corpus(
        paths=str(corpora.jsonl(tmp_path, "messages", corpora.chat_of)),
        format="chat",
        tokenizer=str(folder),
        template=str(template),
    )
    found = [corpus.stored(tmp_path / "stored").fingerprint]
    template.write_text("{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}")
    found.append(corpus.stored(tmp_path / "stored").fingerprint)
    changed = word_level()
    changed.pre_tokenizer = CharDelimiterSplit("b")
    PreTrainedTokenizerFast(tokenizer_object=changed, unk_token="[UNK]").save_pretrained(folder)
    found.append(corpus.stored(tmp_path / "stored").fingerprint)
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("megatron", {"field": "a"}, "data.field has no effect on megatron files"),
        ("tokens", {"tokenizer": "a"}, "data.tokenizer has no effect on tokens files"),
        ("text", {"field": "a"}, "data.field has no effect on text files"),
        ("parquet lists", {"tokenizer": "a"}, "data.tokenizer has no effect on lists of tokens"),
        ("dataset lists", {"tokenizer": "a"}, "data.tokenizer has no effect on lists of tokens"),
    ],
)
def test_options_without_effect_are_refused(
    kind: str, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make, given = MAKERS[kind]
    corpus = Corpus(paths=str(make(tmp_path)), **(given | options))
    with pytest.raises(ConfigError, match=says):
        corpus.token_counts(workers=1)


def test_a_tokenizer_for_lists_of_tokens_is_refused_in_their_row(tmp_path: Path) -> None:
    from evenstep.data import Jsonl

    path = corpora.jsonl(tmp_path, "ids", tokens_of)
    with pytest.raises(InputError, match=r"line 1: field 'ids' is a list of token ids, on which"):
        Jsonl(path, field="ids", tokenizer=len)[0]
    path.write_text('{"ids": [1, true]}\n')
    with pytest.raises(InputError, match=r"field 'ids' has True in its list, expected token ids"):
        Jsonl(path, field="ids")[0]


def test_the_engine_ray_is_refused_for_tokens_and_unknown_engines_always(tmp_path: Path) -> None:
    corpus = Corpus(paths=str(corpora.token_file(tmp_path)))
    with pytest.raises(ConfigError, match="engine ray has no effect on lists of tokens"):
        corpus.token_counts(engine="ray")
    with pytest.raises(ConfigError, match="unknown engine 'threads'"):
        corpus.token_counts(engine="threads")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="workers must be an integer"):
        corpus.token_counts(workers=0)


def test_without_ray_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    corpus = Corpus(paths=str(corpora.jsonl(tmp_path, "text", str)))
    with pytest.raises(ConfigError, match=r"needs ray, .* pip install 'ray\[data\]'"):
        corpus.token_counts(engine="ray")


def test_several_datasets_in_one_folder_are_named(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    one = Dataset.from_dict({"text": ["a"]})
    DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(FileError, match=r"holds several datasets: test, train. Name one, such as"):
        Corpus(paths=str(tmp_path / "both")).token_counts()
    assert Corpus(paths=str(tmp_path / "both" / "train")).token_counts().tolist() == [1]


def test_a_folder_that_is_not_a_dataset_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "state.json").write_text("{}")
    (tmp_path / "a" / "dataset_info.json").write_text("{}")
    with pytest.raises(FileError, match="is not a saved Hugging Face dataset"):
        Corpus(paths=str(tmp_path / "a")).token_counts()
    with pytest.raises(FileError, match="is not a saved Hugging Face dataset"):
        Corpus(paths=str(corpora.texts(tmp_path)), format="dataset").token_counts()


def test_a_missing_column_of_a_dataset_is_named(tmp_path: Path) -> None:
    path = corpora.dataset(tmp_path, "body", str)
    with pytest.raises(InputError, match=r"has no column 'text'; it has id, body"):
        Corpus(paths=str(path)).token_counts()


def test_small_files_are_counted_in_one_process(tmp_path: Path) -> None:
    path = corpora.jsonl(tmp_path, "text", str)
    assert default_workers([path]) == 1
    assert [task_size(total, 4) for total in (0, 5, 640, 10**9)] == [1, 1, 10, 512]


# Chats -----------------------------------------------------------------------------------------


def test_chats_of_more_than_four_megabytes_are_counted_in_processes(tmp_path: Path) -> None:
    path = corpora.many_chats(tmp_path / "chats.jsonl", 9 << 19)  # 4.5 MiB
    chats = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    expected = [
        sum(len(f"<{m['role']}>\n{m['content']}</{m['role']}>\n") for m in chat) for chat in chats
    ]
    corpus = Corpus(paths=str(path), format="chat")
    assert corpus.token_counts(workers=2).tolist() == expected


def test_counting_applies_the_template_once_per_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    path = corpora.many_chats(tmp_path / "chats.jsonl", 1 << 15)
    folder = str(corpora.tokenizer(tmp_path / "tokenizer"))
    kind = type(AutoTokenizer.from_pretrained(folder))
    applied, apply = [0], kind.apply_chat_template

    def counting(*given: Any, **options: Any) -> Any:
        applied[0] += 1
        return apply(*given, **options)

    monkeypatch.setattr(kind, "apply_chat_template", counting)
    corpus = Corpus(paths=str(path), format="chat", tokenizer=folder)
    counts = corpus.token_counts(workers=1)
    assert applied[0] == len(counts)
    stored = corpus.stored(tmp_path / "stored.tokens")
    assert stored.lengths_of(np.arange(len(stored))).tolist() == counts.tolist()


def test_a_script_without_a_main_guard_counts_in_processes(tmp_path: Path) -> None:
    corpora.jsonl(tmp_path, "text", str)
    script = tmp_path / "script.py"
    script.write_text(
        "from evenstep.data import Corpus\n"
        'print(Corpus(paths="text.jsonl").token_counts(workers=2).tolist())\n'
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (f"{COUNTS}\n", "")


# Rows of tokens with masks -----------------------------------------------------------------------


@pytest.mark.parametrize("field", [None, "input_ids"])
@pytest.mark.parametrize(
    "trained", [{"loss_mask": [0, 1, 1]}, {"labels": [-100, 300, 7]}, {"token_mask": [0, 0.5, 1]}]
)
def test_masks_and_labels_beside_input_ids_reach_the_token_file(
    tmp_path: Path, field: str | None, trained: dict[str, list[float]]
) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"input_ids": [5, 300, 7], "id": "a", **trained}) + "\n")
    corpus = Corpus(paths=str(path), field=field)
    assert corpus.token_counts().tolist() == [3]
    stored = corpus.stored(tmp_path / "corpus.tokens")[0]
    assert {name: values.tolist() for name, values in stored.items()} == {
        "input_ids": [5, 300, 7],
        **trained,
    }


def test_masks_that_are_not_read_are_refused_only_for_training(tmp_path: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"ids": [5, 6], "loss_mask": [0, 1]}\n')
    corpus = Corpus(paths=str(path), field="ids")
    assert corpus.token_counts().tolist() == [2]
    with pytest.raises(
        InputError, match=r"line 1: .*Rename 'ids' to 'input_ids', or remove .*k'\.$"
    ):
        corpus.stored(tmp_path / "corpus.tokens")


def test_a_mask_that_some_rows_lack_is_refused(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6]}, {"input_ids": [5, 6], "loss_mask": [0, 1]}]
    for first, has in ((0, "has"), (1, "has no")):
        path = tmp_path / f"{first}.jsonl"
        path.write_text(f"{json.dumps(rows[first])}\n{json.dumps(rows[1 - first])}\n")
        with pytest.raises(InputError, match=f"sample 1 {has} 'loss_mask', unlike the first one"):
            Corpus(paths=str(path)).stored(tmp_path / "corpus.tokens")


def test_a_row_with_text_and_tokens_names_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    path.write_text('{"text": "ab", "input_ids": [5, 6]}\n')
    corpus, fault = Corpus(paths=str(path)), r"line 1: .* Set data\.field to one of them\.$"
    with pytest.raises(InputError, match=fault):
        corpus.token_counts()
    with pytest.raises(InputError, match=fault):
        corpus.stored(tmp_path / "corpus.tokens")


def test_samples_of_other_settings_are_not_taken_for_those_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    first, second = (Corpus(paths=str(tmp_path / name)) for name in ("a.txt", "b.txt"))
    stored = tmp_path / "stored.tokens"
    first.stored(stored)

    def crash(path: Path, data: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "replace_file", crash)
        with pytest.raises(KeyboardInterrupt):  # after the samples, before what they are of
            second.stored(stored)
    assert bytes(first.stored(stored)[0]["input_ids"].tolist()) == b"first"


class WordsTokenizer:
    """A tokenizer whose template shows only what the messages say."""

    chat_template = "{{ content }}"

    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(each) for message in messages for each in message["content"]]}


def test_a_pair_of_which_one_chat_has_no_tokens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out, it would pair the samples after it with others."""
    monkeypatch.setattr(Corpus, "_load_tokenizer", lambda corpus: WordsTokenizer())
    answers = [("yes", "no"), ("", "no"), ("good", "bad")]
    rows = [{"prompt": "", "chosen": chosen, "rejected": rejected} for chosen, rejected in answers]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    corpus = Corpus(paths=str(path), format="pairs", tokenizer=str(tmp_path))
    with pytest.raises(InputError, match=r"pairs.jsonl, line 2: the chosen .* has no tokens"):
        corpus.stored(tmp_path / "pairs.tokens")


def test_masks_by_spans_are_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3], "loss_masking_spans": [[0, 2]]}) + "\n")
    with pytest.raises(InputError, match=r"sample 0: .* has 'loss_masking_spans', which would be"):
        Corpus(paths=str(path)).stored(tmp_path / "rows.tokens")
    path.write_text(json.dumps({"text": "abc", "loss_masking_spans": [[0, 2]]}) + "\n")
    with pytest.raises(InputError, match="has 'loss_masking_spans', but only 'text' is read"):
        Corpus(paths=str(path)).stored(tmp_path / "rows.tokens")


def test_a_byte_order_mark_is_no_token(tmp_path: Path) -> None:
    for name, mark in (("a", b""), ("b", b"\xef\xbb\xbf")):
        for path, content in (("x.txt", "abé".encode()), ("y.jsonl", b'{"text": "c"}\n')):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / path).write_bytes(mark + content)
    for path in ("x.txt", "y.jsonl"):
        stored = [
            Corpus(paths=str(tmp_path / name / path)).stored(tmp_path / f"{name}{path}")
            for name in "ab"
        ]
        assert stored[0].fingerprint == stored[1].fingerprint
    assert Corpus(paths=str(tmp_path / "b" / "x.txt")).token_counts(workers=1).tolist() == [4]


def test_a_file_is_read_once_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("abc")
    (tmp_path / "linked").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    paths = ("texts", str(folder), "texts/../texts/a.txt", "linked/*.txt")
    for validation in (None, (str(folder / "a.txt"),)):
        corpus = Corpus(paths=paths, validation=validation)
        if validation is None:
            assert corpus.token_counts(workers=1).tolist() == [3]
        else:
            assert "is also a file of data.paths" in corpus.faults()[0]


def test_a_broken_link_in_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match=r"b.txt is a link to a file that does not exist"):
        Corpus(paths=str(tmp_path)).token_counts()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "dataset"])
@pytest.mark.parametrize("field", ["input_ids", "ids"])
def test_padding_is_not_stored_as_tokens(tmp_path: Path, kind: str, field: str) -> None:
    """An attention mask of zeros says that tokens are padding, which would be trained."""

    def corpus(folder: Path, mask: list[int]) -> Corpus:
        folder.mkdir()
        row = {field: [5, 6, 0], "attention_mask": mask}
        if kind == "jsonl":
            (folder / "a.jsonl").write_text(json.dumps(row) + "\n")
        elif kind == "parquet":
            pq.write_table(
                pa.table({name: [value] for name, value in row.items()}), folder / "a.parquet"
            )
        else:
            Dataset.from_list([row]).save_to_disk(str(folder))
        return Corpus(paths=str(folder), field=field)

    stored = corpus(tmp_path / "whole", [1, 1, 1]).stored(tmp_path / "whole.tokens")
    assert stored[0]["input_ids"].tolist() == [5, 6, 0]
    with pytest.raises(InputError, match="'attention_mask' hides tokens"):
        corpus(tmp_path / "padded", [1, 1, 0]).stored(tmp_path / "padded.tokens")
