"""Split samples: no label is lost, and every value stays with its token."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from evenstep import MicroBatch, Packed, Recipe, Topology, make_plan
from evenstep.errors import ConfigError, InputError
from evenstep.tensors import Batch, Collator, Extra, View
from tests.examples import examples
from tests.internals import IGNORE_INDEX, Segments
from tests.tensors.works import Work, works

SPLIT = Recipe(layout=Packed(max_tokens=4), overflow="split")
EXTRAS = {
    "old": Extra(aligned="token", pad=-1.0),
    "pair": Extra(aligned="token", shape=(2,)),
    "reward": Extra(aligned="sequence"),
}


def split(lookahead: int = 1, **columns: Any) -> list[Batch]:
    """Tokens 0 to 9 in segments of 4, 4 and 2, in order."""
    values = torch.arange(10)
    sample = {
        "input_ids": values,
        "old": values / 10,
        "pair": torch.stack((values, -values), -1),
        "reward": 1.0,
        **columns,
    }
    collator = Collator(extras=EXTRAS, lookahead=lookahead)
    batches = [collator(micro, [sample]) for micro in make_plan([10], SPLIT)[0, 0]]
    return sorted(batches, key=lambda batch: int(batch.starts[0]))


def test_the_last_slot_of_a_segment_predicts_the_first_token_of_the_next() -> None:
    labels = [batch.labels.tolist() for batch in split()]
    assert labels == [[[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9, -100]]]
    assert [batch.loss_tokens.tolist() for batch in split()] == [[9]] * 3


def test_a_truncated_sample_ends_where_it_was_truncated() -> None:
    plan = make_plan([10], Recipe(layout=Packed(max_tokens=4), overflow="truncate"))
    assert plan.ends(np.array([0])).tolist() == [4]
    batch = Collator()(plan[0, 0][0], [{"input_ids": range(10)}])
    assert batch.labels.tolist() == [[1, 2, 3, -100]]
    assert batch.loss_tokens.tolist() == [3]
    assert batch.continuation is None


@pytest.mark.parametrize(
    "columns",
    [
        {"loss_mask": [1, 1, 1, 1, 0, 1, 1, 1, 1, 0]},
        {"loss_masking_spans": [(4, 5), (9, 10)]},
        {"labels": [0, 1, 2, 3, -100, 5, 6, 7, 8, -100]},
    ],
)
def test_masked_tokens_stay_masked_across_a_split(columns: Any) -> None:
    batches = split(**columns)
    assert [batch.labels.tolist()[0][-1] for batch in batches] == [-100, 8, -100]
    assert [batch.loss_tokens.tolist() for batch in batches] == [[7]] * 3
    weights = torch.cat([batch.loss_weights for batch in batches], dim=1)
    assert weights.tolist() == [[1, 1, 1, 0, 1, 1, 1, 1, 0, 0]]


def test_extras_are_right_at_the_last_slot_before_a_split() -> None:
    for batch in split():
        old, pair = (batch.at_labels("old", "pair").extras[name] for name in ("old", "pair"))
        labelled = batch.labels[0] != IGNORE_INDEX
        expected = batch.labels[0][labelled]
        torch.testing.assert_close(old[0][labelled], expected / 10)  # type: ignore[index]
        assert pair[0][labelled].tolist() == [[v, -v] for v in expected.tolist()]  # type: ignore[index]
        one, everything = View.of_segments(batch)[0], View.of_all(batch)
        for name in ("old", "pair"):
            assert torch.equal(one.ahead(name), everything.ahead(name))


def test_labels_further_ahead_cross_a_split_up_to_the_lookahead() -> None:
    labels = [batch.labels_at(3).tolist() for batch in split(lookahead=3)]
    assert labels == [[[3, 4, 5, 6]], [[7, 8, 9, -100]], [[-100, -100]]]
    with pytest.raises(ConfigError, match=r"lookahead=2"):
        split()[0].labels_at(2)
    assert split()[2].labels_at(2).tolist() == [[-100, -100]]  # the sample ends here
    with pytest.raises(ConfigError, match=r"lookahead must be an integer in .*, got 0"):
        Collator(lookahead=0)


def test_unshifted_labels_lose_the_label_at_a_split() -> None:
    labels = [batch.unshifted_labels.tolist() for batch in split()]
    assert labels == [[[-100, 1, 2, 3]], [[-100, 5, 6, 7]], [[-100, 9]]]


def test_a_column_added_later_is_refused_if_its_next_value_is_unknown() -> None:
    batch = split()[0]
    added = replace(batch, extras={"new": torch.zeros(1, 4)}, aligned={"new": "token"})
    with pytest.raises(InputError, match="'new' was added after collating"):
        added.at_labels("new")
    assert batch.ahead(batch.tokens, fill=-1).tolist() == [[1, 2, 3, -1]]


def test_a_batch_moves_with_its_continuation() -> None:
    moved = split()[0].to("cpu")
    assert moved.continuation is not None
    assert moved.continuation.values["old"].tolist() == [[pytest.approx(0.4)]]
    meta = moved.continuation.to("meta")
    assert {value.device.type for value in (meta.counts, *meta.values.values())} == {"meta"}


def test_a_micro_batch_made_by_hand_holds_whole_samples() -> None:
    three = np.array([3])
    micro = MicroBatch(Segments(np.array([0]), np.array([0]), three), np.array([0, 1]), 3, three)
    assert micro.sample_ends is micro.sample_lengths


@examples(60)
@given(works(overflow=("split",)))
def test_no_label_is_lost_or_counted_twice_however_samples_are_split(work: Work) -> None:
    found = [0] * len(work.samples)
    for batch in work.batches:
        assert torch.equal(batch.labels_at(1), batch.labels)
        for view in View.of_segments(batch):
            sample = int(batch.sample_ids[view.tile])
            found[sample] += int((view.labels != IGNORE_INDEX).sum())
            for name in ("old_log_probs", "features"):
                values = torch.as_tensor(work.samples[sample][name]).float()
                first = int(batch.starts[view.tile]) + 1
                own = values[first : first + len(view.tokens)]
                assert torch.equal(view.ahead(name)[: len(own)], own)
            assert int(batch.loss_tokens[view.tile]) == work.samples[sample]["loss_mask"][1:].sum()
        assert not batch.loss_tokens[batch.sample_ids < 0].any()
    assert found == [int(sample["loss_mask"][1:].sum()) for sample in work.samples]


def test_alignment_does_not_change_labels_across_a_split() -> None:
    recipe = Recipe(layout=Packed(max_tokens=8), topology=Topology(cp=2), overflow="split")
    plan = make_plan([11], recipe)
    batches = [Collator()(micro, [{"input_ids": range(11)}]) for micro in plan[0, 0]]
    first = min(batches, key=lambda batch: int(batch.starts[0]))
    assert first.labels.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
