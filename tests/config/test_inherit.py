"""Files that build on others: `defaults` of NeMo-RL and Hydra, merge keys, `_override_`."""

import dataclasses
from pathlib import Path

import pytest

from evenstep import Packed, Recipe
from evenstep.config import FaultsError, Loaded, load_file
from evenstep.errors import ConfigError, FileError
from tests.internals import DIALECTS, PARTS, read_tree


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


ENGINES = {
    "engine__dp": "# @package _global_\nengine: dp\n",
    "engine__megatron": "# @package _global_\nengine: megatron\n",
    "actor__dp_actor": "size: 1\n",
    "actor__megatron_actor": "size: 2\n",
    "actor__other": "size: 3\n",
}
MAIN = "defaults: [engine: dp, actor@worker.actor: '${engine}_actor', _self_]\n"


@pytest.mark.parametrize(
    ("files", "choices", "data"),
    [
        ({"main": MAIN}, {}, {"engine": "dp", "worker": {"actor": {"size": 1}}}),
        (
            {"main": MAIN},
            {"engine": "megatron"},
            {"engine": "megatron", "worker": {"actor": {"size": 2}}},
        ),
        (
            {"main": MAIN},
            {"actor@worker.actor": "other", "seed": "3"},
            {"engine": "dp", "worker": {"actor": {"size": 3}}},
        ),
        (
            {"top": "defaults: [main, override engine: megatron, _self_]\n", "main": MAIN},
            {},
            {"engine": "megatron", "worker": {"actor": {"size": 2}}},
        ),
        (
            {"top": "defaults: [main, override engine: megatron, _self_]\n", "main": MAIN},
            {"engine": "dp"},
            {"engine": "dp", "worker": {"actor": {"size": 1}}},
        ),
    ],
)
def test_groups_choose_files_and_name_each_other(
    files: dict[str, str], choices: dict[str, str], data: dict[str, object], tmp_path: Path
) -> None:
    tree = read_tree(write(tmp_path, **files, **ENGINES), choices)
    assert tree.data == data
    assert tree.groups == {"engine", "actor@worker.actor"}


@pytest.mark.parametrize("place", ["file://lib/configs", "pkg://lib.configs", "lib/configs"])
def test_further_folders_are_searched(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        tmp_path,
        mine__recipes__main=f"hydra: {{searchpath: ['{place}']}}\ndefaults: [base, _self_]\na: 1\n",
        lib__configs__base="defaults: [actor: dp, _self_]\na: 2\nb: 3\n",
        lib__configs__actor__dp="size: 4\n",
    )
    expected = {"a": 1, "b": 3, "actor": {"size": 4}}
    data = read_tree(path).data
    assert {key: data[key] for key in expected} == expected
    monkeypatch.chdir(tmp_path / "lib")
    assert read_tree(path).data == data


def test_an_installed_package_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, folder = tmp_path / "site", tmp_path / "mine"
    write(installed, installed_lib__configs__base="a: 2\n")
    monkeypatch.syspath_prepend(str(installed))
    main = "hydra: {searchpath: ['pkg://installed_lib.configs']}\ndefaults: [base]\n"
    assert read_tree(write(folder, main=main)).data["a"] == 2


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


VERL = """
defaults: [engine: dp, actor@actor_rollout_ref.actor: '${engine}_actor', _self_]
actor_rollout_ref:
  actor: {use_dynamic_bsz: false, ppo_max_token_len_per_gpu: 4096}
  rollout: {log_prob_max_token_len_per_gpu: '${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}'}
  model: {use_remove_padding: true}
data: {train_files: a.parquet}
trainer: {project_name: x, nnodes: 1}
"""
ACTORS = {
    "engine__dp": "",
    "engine__megatron": "",
    "actor__dp_actor": "strategy: fsdp\n",
    "actor__megatron_actor": "strategy: megatron\nmegatron: {tensor_model_parallel_size: 2}\n",
}


def verl(folder: Path, *overrides: str) -> Loaded:
    path = write(folder, main=VERL, **ACTORS)
    return load_file(
        path, ["actor_rollout_ref.actor.use_dynamic_bsz=true", *overrides], dialect="verl"
    )


def test_overrides_may_be_keys_of_the_other_system(tmp_path: Path) -> None:
    loaded = verl(
        tmp_path,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        "+actor_rollout_ref.actor.optim.extra=1",
        "trainer.nnodes=2",
        "trainer.project_name=[{\\*}",
        "data.train_files=b.parquet",
        "layout.round_to=16",
        "min_saving=0.5",
    )
    recipe = loaded.settings.recipe
    assert recipe.layout == Packed(max_tokens=8192, round_to=16)
    assert (recipe.topology.dp, recipe.min_saving) == (16, 0.5)
    assert loaded.settings.log_probs is not None
    assert loaded.settings.log_probs.layout.max_tokens == 8192
    assert loaded.origins["layout.max_tokens"].endswith("ppo_max_token_len_per_gpu, --set")
    assert loaded.origins["layout.round_to"] == "--set"


def test_an_override_may_choose_a_file(tmp_path: Path) -> None:
    topology = verl(tmp_path, "engine=megatron").settings.recipe.topology
    assert (topology.dp, topology.tp) == (4, 2)
    chosen = verl(tmp_path, "actor@actor_rollout_ref.actor=megatron_actor")
    assert chosen.settings.recipe.topology == topology
    assert not any("@" in name for name in chosen.ignored)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("toplogy.dp=4", "toplogy is not a known key. Did you mean topology?"),
        ("trainer.nodes=4", "trainer.nodes is not a known key"),
        ("actor_rollout_ref.actor.model_engine=megatron", "is not a key of the file. Check its"),
        (
            "data.shuffel=true",
            "data.shuffel is not a key of the file. Check its spelling, or write",
        ),
        ("~trainer.logger", "~trainer.logger removes a key, which is not supported"),
        ("layout.max_tokens={", "is not valid YAML"),
        ("layout.max_tokens", "must be of the form key=value"),
        ("actor_rollout_ref.actor.ppo_max_token_len=1", "ppo_max_token_len is not a known key"),
        (
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=x",
            "an integer of at least 1, got 'x'",
        ),
        (
            "+actor_rollout_ref.actor.use_dynamic_bzs=true",
            "Did you mean actor_rollout_ref.actor.use_dynamic_bsz?",
        ),
    ],
)
def test_a_mistake_in_an_override_is_named(override: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        verl(tmp_path, override)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", DIALECTS)
def test_no_key_of_a_system_is_one_of_ours(name: str) -> None:
    sections = {**PARTS, "log_probs": Recipe, "": Recipe}
    theirs = {"data.validation"}  # of NeMo-RL; in an override of its files it is that one
    for key in set(DIALECTS[name].keys) - theirs:
        section, _, rest = key.rpartition(".")
        fields = dataclasses.fields(sections[section]) if section in sections else ()
        assert rest not in {field.name for field in fields}, key


def test_overrides_of_systems_without_defaults_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, main="train: {micro_batch_size: 2}\n")
    loaded = load_file(path, ["data.max_seq_len=512", "train.micro_batch_size=3"], dialect="veomni")
    assert loaded.settings.recipe.layout.max_tokens == 1536
    nemo = write(tmp_path, nemo="policy: {dynamic_batching: {enabled: true}}\n")
    loaded = load_file(nemo, ["policy.dynamic_batching.train_mb_tokens=64"], dialect="nemo-rl")
    assert loaded.settings.recipe.layout.max_tokens == 64
