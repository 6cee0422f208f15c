"""The survey of configuration files tells right from wrong, on files of our own."""

from pathlib import Path

import pytest

from benchmarks.configs import SYSTEMS, outcome, runs_of_scripts, section, survey

FILES = {
    "nemo-rl/examples/base.yaml": """
policy:
  train_global_batch_size: 64
  train_micro_batch_size: 4
  sequence_packing: {enabled: true, train_mb_tokens: "${mul:512,4}", algorithm: concatenative}
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, context_parallel_size: 1}
  generation: {colocated: {enabled: true, resources: {num_nodes: null, gpus_per_node: null}}}
grpo: {}
cluster: {num_nodes: 4, gpus_per_node: 8}
""",
    "nemo-rl/examples/separate.yaml": """
defaults: base.yaml
policy: {generation: {colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}}}
""",
    "nemo-rl/examples/odd.yaml": "defaults: base.yaml\ncluster: {gpus_per_node: 7, num_nodes: 1}\n",
    "nemo-rl/examples/eval.yaml": "eval: {}\ncluster: {num_nodes: 1, gpus_per_node: 8}\n",
    "roll/examples/one.yaml": "actor_train: {device_mapping: 'list([0,1])'}\n",
    "cosmos-rl/configs/one.toml": "[train]\ntrain_batch_per_replica = 4\n",
    "veomni/configs/one.yaml": "train: {bsz_warmup_ratio: 0.1, global_batch_size: 2}\n",
    "fast-llm/examples/one.yaml": "training: {}\nmodel: {}\ndata: {micro_batch_size: 4}\n",
    "fast-llm/examples/pod.yaml": "kind: Pod\n",
    "verl/verl/trainer/config/ppo_trainer.yaml": """
defaults: [actor@actor_rollout_ref.actor: dp, _self_]
actor_rollout_ref:
  rollout: {n: 2, log_prob_use_dynamic_bsz: false}
  model: {use_remove_padding: true}
trainer: {nnodes: 1, n_gpus_per_node: 8}
""",
    "verl/verl/trainer/config/actor/dp.yaml": """
strategy: fsdp
ppo_mini_batch_size: 16
ppo_micro_batch_size: null
ppo_micro_batch_size_per_gpu: null
ppo_max_token_len_per_gpu: 4096
use_dynamic_bsz: false
""",
    "verl/examples/run.sh": """
tokens=$((2 * 4096))
ACTOR=(actor_rollout_ref.actor.use_dynamic_bsz=True
       actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${tokens})
python3 -m verl.trainer.main_ppo "${ACTOR[@]}" trainer.nnodes=2 "$@"
""",
}


@pytest.fixture
def checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_file_has_the_outcome_that_its_system_gives_it(checkouts: Path) -> None:
    found = survey(checkouts, [system.name for system in SYSTEMS], lambda _: None)
    kinds = {
        f"{name.split()[0]} {Path(row.file).name}": row.kind
        for name, outcomes in found.items()
        for row in outcomes.rows
    }
    assert kinds == {
        "nemo-rl base.yaml": "loads",
        "nemo-rl separate.yaml": "loads",
        "nemo-rl odd.yaml": "refused",
        "nemo-rl eval.yaml": "other",
        "roll one.yaml": "loads",
        "cosmos-rl one.toml": "loads",
        "veomni one.yaml": "loads",
        "fast-llm one.yaml": "loads",
        "fast-llm pod.yaml": "other",
        "verl ppo_trainer.yaml": "refused",
        "verl, run.sh ppo_trainer.yaml": "loads",
    }
    assert all(target.met for target in section(found).targets)


def test_scripts_give_their_overrides_without_running_anything(checkouts: Path) -> None:
    ((script, file, overrides),) = runs_of_scripts(checkouts / "verl")
    assert (script.name, file.name) == ("run.sh", "ppo_trainer.yaml")
    assert overrides == [
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        "trainer.nnodes=2",
    ]


def test_other_sizes_are_a_misread_file(checkouts: Path) -> None:
    nemo = SYSTEMS[0]
    file = checkouts / "nemo-rl/examples/base.yaml"
    assert outcome(nemo, file, "base").kind == "loads"
    row = outcome(nemo, file, "base", ["cluster.num_nodes=2"])  # NeMo-RL's rules do not see it
    assert (row.kind, row.says) == ("misread", "topology.dp is 8, the system has 16")
