"""Every configuration block of the five documents loads and means what it says."""

from pathlib import Path

import pytest

from evenstep import (
    Cost,
    Limits,
    Packed,
    Padded,
    Recipe,
    Steps,
    Topology,
    find_prefixes,
    make_plan,
)
from evenstep.config import FaultsError, StreamSettings, load_file, load_recipe, load_settings
from evenstep.data import Pool
from tests.config import dialect_files as files
from tests.config.dialect_files import CASES, Case


@pytest.mark.parametrize("name", CASES)
def test_every_file_loads_and_says_where_each_value_comes_from(name: str, tmp_path: Path) -> None:
    loaded = CASES[name].load(tmp_path)
    given = {origin for origin in loaded.origins.values() if origin != "default"}
    assert given
    places = (f"{CASES[name].dialect}.", "derived:", "default", "training")
    for origin in given:
        assert any(place in origin for place in places), origin


# cosmos-rl ---------------------------------------------------------------------------------------


def test_cosmos_defaults_written_out(tmp_path: Path) -> None:
    settings = files.COSMOS_DEFAULTS.load(tmp_path, "topology.dp=4").settings
    assert settings.recipe == Recipe(
        layout=Padded(max_tokens=32768),
        topology=Topology(dp=4),
        steps=Steps(micro_batches=1),
        overflow="alone",
    )
    assert settings.stream == StreamSettings(
        pool=Pool(samples=32, strategy="prefer_closest"), infinite_loop=True, max_num_steps=100
    )
    assert settings.log_probs is None


def test_cosmos_padded_and_packed(tmp_path: Path) -> None:
    padded = files.COSMOS_PADDED.load(tmp_path).settings
    assert padded.recipe.layout == Padded(max_tokens=65536)
    assert padded.recipe.steps == Steps(micro_batches=4)
    assert padded.stream == StreamSettings(
        pool=Pool(samples=64, strategy="prefer_closest"),
        seed=42,
        infinite_loop=True,
        max_num_steps=1000,
    )
    packed = files.COSMOS_PACKED.load(tmp_path).settings
    assert packed.recipe.layout == Packed(max_tokens=65536)
    assert packed.stream.pool == Pool(samples=64, strategy="greedy")


def test_the_order_of_tables_does_not_matter(tmp_path: Path) -> None:
    """An earlier edition of the document puts [train] last."""
    train, policy = files.COSMOS_PADDED.text.strip().split("\n\n")
    turned = Case("cosmos-rl", f"{policy}\n\n{train}\n", ".toml")
    assert turned.load(tmp_path).settings == files.COSMOS_PADDED.load(tmp_path).settings


# ROLL --------------------------------------------------------------------------------------------


def test_the_full_configuration_of_roll(tmp_path: Path) -> None:
    loaded = files.ROLL_FULL.load(tmp_path)
    train, infer = loaded.settings.recipe, loaded.settings.log_probs
    assert train == Recipe(
        layout=Padded(max_tokens=8192, round_to=128),
        topology=Topology(dp=8),
        steps=Steps(samples=2 * 64 * 8),
        sync_every="step",
    )
    assert infer == Recipe(
        layout=Padded(max_tokens=16384, round_to=128), topology=Topology(dp=8), sync_every="step"
    )
    assert loaded.notes == ()
    assert "actor_infer" in loaded.ignored
    assert "actor_train.training_args.learning_rate" in loaded.ignored
    assert loaded.origins["layout.max_tokens"].endswith(
        "actor_train.max_tokens_per_microbatch_in_train, roll.yaml:23"
    )
    assert loaded.origins["log_probs.layout.max_tokens"].endswith("in_infer, roll.yaml:26")


def test_packing_in_roll_balances_by_its_cost(tmp_path: Path) -> None:
    settings = files.ROLL_PACKED.load(tmp_path).settings
    topology = Topology(dp=2, tp=2, pp=2, vpp=2, variable_seq_lengths=True)
    assert settings.recipe == Recipe(
        layout=Packed(max_tokens=16384),
        topology=topology,
        steps=Steps(samples=4 * 8 * 2),
        cost=Cost(per_token=24576, per_pair=1),
        sync_every="step",
    )
    assert settings.log_probs is not None
    assert settings.log_probs.layout == Packed(max_tokens=32768)


# NeMo-RL -----------------------------------------------------------------------------------------


def test_packing_in_nemo_rl(tmp_path: Path) -> None:
    loaded = files.NEMO_PACKED.load(tmp_path)
    layout = Packed(max_tokens=2048, packer="modified_first_fit_decreasing")
    assert loaded.settings.recipe == Recipe(layout=layout)
    assert loaded.settings.log_probs == Recipe(layout=layout)
    assert any("sequence_length_round" in note and "no effect" in note for note in loaded.notes)


def test_dynamic_batching_in_nemo_rl(tmp_path: Path) -> None:
    settings = files.NEMO_DYNAMIC.load(tmp_path).settings
    assert settings.recipe == Recipe(layout=Padded(max_tokens=4096, round_to=64))
    assert settings.log_probs == Recipe(layout=Padded(max_tokens=8192, round_to=64))


def test_a_megatron_file_with_interpolations(tmp_path: Path) -> None:
    loaded = files.NEMO_MEGATRON.load(tmp_path)
    assert loaded.settings.recipe == Recipe(
        layout=Packed(max_tokens=2048, packer="first_fit_decreasing", round_to=16),
        topology=Topology(dp=2, tp=2, cp=2, pp=2, sequence_parallel=True),
        steps=Steps(samples=512),
        sync_every="step",
    )
    assert loaded.settings.log_probs is not None
    assert loaded.settings.log_probs.layout.max_tokens == 4096
    assert "${mul:${policy.max_total" in loaded.origins["layout.max_tokens"]
    assert set(loaded.ignored) == {
        "grpo.num_prompts_per_step", "grpo.seed", "policy.model_name",
        "policy.megatron_cfg.optimizer", "policy.max_grad_norm",
    }  # fmt: skip


# VeOmni ------------------------------------------------------------------------------------------


def test_a_pad_length_is_inferred_from_size_and_longest_sequence(tmp_path: Path) -> None:
    settings = files.VEOMNI_ON.load(tmp_path).settings
    assert settings.recipe.layout == Packed(max_tokens=8, pad_to=8)
    assert settings.stream.pool == Pool(samples=200, strategy="greedy")


def test_without_dyn_bsz_samples_are_counted_and_packed_in_order(tmp_path: Path) -> None:
    recipe = files.VEOMNI_OFF.load(tmp_path).settings.recipe
    assert recipe == Recipe(layout=Packed(samples=2), steps=Steps(samples=2), balance="none")


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (files.VEOMNI_SFT_PADDED, Packed(samples=2, pad_to=8)),
        (files.VEOMNI_DYNAMIC_PADDED, Packed(max_tokens=10, pad_to=10)),
    ],
)
def test_the_documented_pad_length_is_accepted_with_a_note(
    case: Case, layout: Packed, tmp_path: Path
) -> None:
    loaded = case.load(tmp_path)
    assert loaded.settings.recipe.layout == layout
    assert any("pad_packed_to_length" in note for note in loaded.notes)


def test_effective_counting_limits_labels_and_slots(tmp_path: Path) -> None:
    settings = files.VEOMNI_EFFECTIVE.load(tmp_path).settings
    assert settings.recipe == Recipe(
        layout=Packed(max_tokens=12288, round_to=2),
        topology=Topology(dp=8),
        steps=Steps(micro_batches=4),
        limits=Limits(columns={"loss_tokens": 8192}),
        overflow="alone",
    )
    pool = Pool(samples=500, strategy="greedy", warmup_steps=10, warmup_tokens=200)
    assert settings.stream == StreamSettings(pool=pool, max_num_steps=500, seed=42)


# Fast-LLM ----------------------------------------------------------------------------------------


def test_micro_batches_of_fast_llm_have_one_shape(tmp_path: Path) -> None:
    settings = files.FAST_LLM.load(tmp_path).settings
    assert settings.recipe == Recipe(
        layout=Packed(pad_to=10000),
        topology=Topology(dp=4, cp=2),
        steps=Steps(samples=256),
        overflow="split",
    )
    assert not settings.trainer.per_micro_batch_normalization


def test_the_flag_of_the_issue_is_read(tmp_path: Path) -> None:
    settings = files.FAST_LLM_LAZY.load(tmp_path).settings
    assert settings.trainer.per_micro_batch_normalization
    assert settings.recipe.steps == Steps(micro_batches=1)
    assert settings.recipe.layout == Packed(pad_to=2048)


# verl --------------------------------------------------------------------------------------------


def test_dynamic_batches_of_verl(tmp_path: Path) -> None:
    loaded = files.VERL_DYNAMIC.load(tmp_path)
    settings = loaded.settings
    assert settings.recipe == Recipe(
        layout=Packed(max_tokens=2 * 16384, round_to=2),
        topology=Topology(dp=8),
        steps=Steps(samples=256 * 8),
        cost=Cost(per_token=24576, per_pair=1),
    )
    assert settings.log_probs is not None
    assert settings.log_probs.layout.max_tokens == 4 * 16384
    assert settings.log_probs.steps == Steps()
    assert "critic" in loaded.ignored


def test_fixed_batches_of_verl(tmp_path: Path) -> None:
    settings = files.VERL_FIXED.load(tmp_path).settings
    assert settings.recipe == Recipe(
        layout=Padded(samples=4),
        topology=Topology(dp=4),
        steps=Steps(samples=256),
        balance="none",
        sync_every="step",
    )
    assert settings.log_probs is not None
    assert settings.log_probs.layout == Padded(samples=8)


# Loading -----------------------------------------------------------------------------------------


VERL_ANSWERS = """
actor_rollout_ref:
  actor: {use_dynamic_bsz: true}
  rollout: {n: 8}
  model: {use_remove_padding: true}
"""
ROLL_ANSWERS = """
num_return_sequences_in_group: 8
actor_train:
  use_sequence_packing: true
  sequence_packing_args:
    algorithm: load_balance
    max_packed_sequence_length_train: 4096
    max_packed_sequence_length_forward: 4096
"""
NEMO_ANSWERS = """
policy: {sequence_packing: {enabled: true, train_mb_tokens: 2048, logprob_mb_tokens: 2048}}
grpo: {num_generations_per_prompt: 8}
"""


@pytest.mark.parametrize(("name", "text"), [("verl", VERL_ANSWERS), ("roll", ROLL_ANSWERS)])
def test_several_answers_share_their_prompt(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for count in (1, 8):
        path.write_text(text.replace("n: 8", f"n: {count}"), encoding="utf-8")
        path.write_text(path.read_text().replace("group: 8", f"group: {count}"), encoding="utf-8")
        loaded = load_file(path, dialect=name)
        assert loaded.settings.stream.share_prefixes == (count == 8)
    assert "8 answers to a prompt" in loaded.origins["stream.share_prefixes"]


def test_answers_of_nemo_rl_share_their_prompt_instead_of_its_packer(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(NEMO_ANSWERS, encoding="utf-8")
    loaded = load_file(path, dialect="nemo-rl")
    settings, packer = loaded.settings, "modified_first_fit_decreasing"
    assert settings.stream.share_prefixes
    assert settings.log_probs is not None
    for recipe in (settings.recipe, settings.log_probs):
        assert recipe.layout == Packed(max_tokens=2048)
        make_plan([5, 6], recipe, prefixes=find_prefixes([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]))
    (note,) = (note for note in loaded.notes if packer in note)
    assert "8 answers to a prompt share it" in note
    # what the note says
    other = load_file(
        path, ["stream.share_prefixes=false", f"layout.packer={packer}"], dialect="nemo-rl"
    )
    assert not other.settings.stream.share_prefixes
    assert other.settings.recipe.layout == Packed(max_tokens=2048, packer=packer)
    path.write_text(NEMO_ANSWERS.replace("prompt: 8", "prompt: 1"), encoding="utf-8")
    single = load_file(path, dialect="nemo-rl")
    assert single.settings == other.settings  # of log-probs too
    assert not any(packer in note for note in single.notes)


def test_what_prevents_shared_prompts_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    pipeline = "megatron_cfg: {enabled: true, pipeline_model_parallel_size: 2}"
    text = NEMO_ANSWERS.replace("policy: {", f"policy: {{{pipeline}, ")
    path.write_text(text, encoding="utf-8")
    loaded = load_file(path, ["topology.dp=2"], dialect="nemo-rl")
    assert not loaded.settings.stream.share_prefixes
    assert loaded.settings.recipe.layout.packer == "modified_first_fit_decreasing"
    assert any("share_prefixes), but not with topology.pp" in note for note in loaded.notes)


def test_a_recipe_is_the_one_for_training(tmp_path: Path) -> None:
    path = files.NEMO_DYNAMIC.write(tmp_path)
    settings = load_settings(path, dialect="nemo-rl")
    assert load_recipe(path, dialect="nemo-rl") == settings.recipe != settings.log_probs


@pytest.mark.parametrize("name", CASES)
def test_a_file_without_its_system_is_one_fault(name: str, tmp_path: Path) -> None:
    path = CASES[name].write(tmp_path)
    if path.suffix == ".yaml":
        path.write_text(path.read_text() + "seed: 42\n")
    with pytest.raises(FaultsError) as caught:
        load_recipe(path)
    (fault,) = caught.value.faults
    assert f"Add --from {CASES[name].dialect}, or dialect='{CASES[name].dialect}'" in fault


def test_overrides_are_native_and_reach_the_log_probs(tmp_path: Path) -> None:
    overrides = ("topology.dp=3", "log_probs.layout.max_tokens=65536", "overflow=truncate")
    loaded = files.NEMO_DYNAMIC.load(tmp_path, *overrides)
    train, infer = loaded.settings.recipe, loaded.settings.log_probs
    assert infer is not None
    assert (train.topology.dp, infer.topology.dp) == (3, 3)
    assert (train.layout.max_tokens, infer.layout.max_tokens) == (4096, 65536)
    assert infer.overflow == "truncate"
    assert loaded.origins["topology.dp"] == loaded.origins["overflow"] == "--set"
    assert loaded.origins["log_probs.overflow"] == "as in training"
    assert not any("how many ranks" in note for note in loaded.notes)


def test_a_model_replaces_the_cost_that_a_system_assumes(tmp_path: Path) -> None:
    path = files.VERL_DYNAMIC.write(tmp_path)
    recipe = load_recipe(path, dialect="verl", model="llama-3-8b")
    assert recipe.cost == Cost.named("llama-3-8b")
