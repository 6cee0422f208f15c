"""Files that build on others: `defaults` of NeMo-RL and Hydra, merge keys, `_override_`."""

from pathlib import Path

import pytest

from evenstep.config import FaultsError, load_file
from evenstep.config.inherit import read_tree
from evenstep.errors import ConfigError, FileError


def write(folder: Path, **texts: str) -> Path:
    """Files by name; `actor__dp` is actor/dp.yaml. The first one is returned."""
    paths = []
    for name, text in texts.items():
        path = folder / (name.replace("__", "/") + ".yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        paths.append(path)
    return paths[0]


def test_a_file_wins_over_its_defaults_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        child="defaults: [one.yaml, two.yaml]\na: {x: 3}\n",
        one="a: {x: 1, y: 1, z: 1}\nl: [1, 2]\n",
        two="defaults: three.yaml\na: {y: 2}\nl: [3]\n",
        three="a: {z: 4}\nb: 5\n",
    )
    tree = read_tree(path)
    assert tree.data == {"a": {"x": 3, "y": 2, "z": 4}, "l": [3], "b": 5}
    assert tree.place(("a", "x")) == "child.yaml:2"
    assert tree.place(("a", "y")) == "two.yaml:2"
    assert tree.place(("b",)) == "three.yaml:2"


def test_a_section_may_replace_instead_of_merging(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        child="defaults: base\na: {_override_: true, y: 2}\nb: null\n",
        base="a: {x: 1}\nb: {c: 1}\n",
    )
    assert read_tree(path).data == {"a": {"y": 2}, "b": None}


def test_groups_of_hydra_stand_where_their_package_says(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        main=(
            "defaults:\n"
            "  - actor@worker.actor: dp\n"
            "  - ref: dp\n"
            "  - extra@_here_\n"
            "  - optional none: here\n"
            "  - override hydra/job_logging: custom\n"
            "  - _self_\n"
            "worker: {actor: {size: 9}}\n"
        ),
        actor__dp="defaults: [../optim@optim: adam, base, _self_]\nstrategy: fsdp\n",
        actor__base="strategy: ???\nsize: 1\nother: 2\n",
        optim__adam="lr: 1\n",
        ref__dp="log: 3\n",
        extra="top: 7\n",
    )
    assert read_tree(path).data == {
        "worker": {"actor": {"optim": {"lr": 1}, "strategy": "fsdp", "size": 9, "other": 2}},
        "ref": {"log": 3},
        "top": 7,
    }
    assert read_tree(path).place(("worker", "actor", "optim", "lr")) == "adam.yaml:1"


def test_self_says_where_the_file_stands(tmp_path: Path) -> None:
    path = write(tmp_path, main="defaults: [_self_, last]\na: 1\n", last="a: 2\n")
    assert read_tree(path).data == {"a": 2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("defaults: [absent.yaml]\n", "main.yaml:1: defaults names absent.yaml, and"),
        ("defaults: [group: absent]\n", "defaults names group/absent"),
        ("defaults: main.yaml\n", "among its own defaults"),
        ("defaults: [3]\n", "expected the name of a file"),
        ("defaults: [{a: b, c: d}]\n", "expected the name of a file"),
        ("defaults: [a: '${b}']\n", "names no file"),
    ],
)
def test_a_default_that_cannot_be_resolved_is_named(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, FileError)) as caught:
        read_tree(write(tmp_path, main=text))
    assert says in str(caught.value)


def test_two_files_that_build_on_each_other_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, one="defaults: two\n", two="defaults: one\n")
    with pytest.raises(ConfigError, match="among its own defaults"):
        read_tree(path)


def test_interpolations_see_the_merged_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        child="defaults: base.yaml\npolicy: {train_micro_batch_size: 8}\n",
        base=(
            "policy:\n"
            "  train_micro_batch_size: 4\n"
            "  sequence_packing: &packing\n"
            "    enabled: true\n"
            "    train_mb_tokens: ${mul:512,${policy.train_micro_batch_size}}\n"
            "  dynamic_batching:\n"
            "    <<: *packing\n"
            "    enabled: false\n"
        ),
    )
    loaded = load_file(path, dialect="nemo-rl")
    assert loaded.settings.recipe.layout.max_tokens == 4096
    assert "base.yaml:5, ${mul:512" in loaded.origins["layout.max_tokens"]


def test_faults_name_the_file_that_has_them(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        child="defaults: base.yaml\npolicy: {sequence_packing: {enabled: maybe}}\n",
        base="policy:\n  sequence_packing:\n    train_mb_token: 3\n",
    )
    with pytest.raises(FaultsError) as caught:
        load_file(path, dialect="nemo-rl")
    misspelt, wrong, *_ = caught.value.faults
    assert misspelt.endswith("(base.yaml:3)")
    assert wrong.startswith("policy.sequence_packing.enabled must be true or false, got 'maybe'")
    assert wrong.endswith("(child.yaml:2)")


@pytest.mark.parametrize("dialect", ["nemo-rl", "veomni"])
def test_a_file_that_repeats_itself_is_not_expanded(dialect: str, tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [
        f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}" for n in range(1, 12)
    ]
    lines += ["policy: {sequence_packing: *a11, train_micro_batch_size: *a11}"]
    lines += ["train: {micro_batch_size: *a11, other: *a11}"]
    with pytest.raises(FaultsError) as caught:
        load_file(write(tmp_path, main="\n".join(lines)), dialect=dialect)
    assert len(str(caught.value)) < 20_000


def test_only_systems_on_omegaconf_read_defaults(tmp_path: Path) -> None:
    main = "defaults: absent.yaml\ntrain: {dyn_bsz: true}\n"
    loaded = load_file(write(tmp_path, main=main), dialect="veomni")
    assert loaded.settings.recipe.layout.max_tokens == 2048
    assert loaded.ignored == ("defaults",)
