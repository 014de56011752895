"""Plans: every wanted row has one source, kept rows fit, and looking ahead never misleads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from featsync.errors import FeatureError, PlanError
from featsync.plan import FeatureKey, FeaturePlan, Fetch, Keep, Plan, Want
from featsync.retention import RETENTION
from featsync.window import DistinctIds, PlanWindow
from support.sessions import plans
from support.strategies import EDGE, KEYS, NODE, OTHER, cases

POLICIES = sorted(RETENTION)


def retention(name, num_rows, num_slots, window):
    return RETENTION[name](num_rows, num_slots, window, None)


def window_of(case):
    return PlanWindow(
        {
            key: retention(case.policy, len(case.tables[key]), count, case.window)
            for key, count in case.slots.items()
        }
    )


def epochs_of(case):
    """Every plan of every epoch, with its wants and those of the minibatch before it."""
    for epoch in case.epochs:
        window = window_of(case)
        last = {}
        for plan, wants in plans(window, epoch.batches, case.window):
            yield plan, wants, last
            last = wants


def ids_of(want):
    return torch.cat(want.ids).long().numpy()


@given(case=cases())
def test_invariant_every_wanted_row_has_exactly_one_source(case):
    for plan, wants, _ in epochs_of(case):
        for key, want in wants.items():
            fetch = plan.features[key].fetch
            assert fetch.num_rows == want.num_rows
            assert fetch.num_home + fetch.num_cached == want.num_rows
            if key not in case.slots:
                assert fetch == Fetch(want.num_rows)
                continue
            positions = torch.cat([fetch.home_positions, fetch.cached_positions])
            assert positions.dtype == torch.int64
            assert sorted(positions.tolist()) == list(range(want.num_rows))
            for part in (fetch.home_positions, fetch.cached_positions):
                assert part.tolist() == sorted(part.tolist())
            assert len(fetch.cached_slots) == fetch.num_cached


@given(case=cases())
def test_invariant_kept_rows_fit_and_are_rows_of_the_minibatch_before(case):
    for plan, _, last in epochs_of(case):
        for key, part in plan.features.items():
            if plan.batch == 0 or key not in case.slots:
                assert part.keep is None
                continue
            positions, slots = part.keep.positions, part.keep.slots
            num_rows = last[key].num_rows if key in last else 0
            assert len(positions) == len(slots) <= case.slots[key]
            assert len(set(slots.tolist())) == len(slots)
            assert all(0 <= slot < case.slots[key] for slot in slots)
            assert all(0 <= position < num_rows for position in positions)
            rows = ids_of(last[key])[positions] if num_rows else []
            assert len(set(rows)) == len(rows), "a row is written to two slots"


@given(case=cases())
def test_invariant_a_cached_row_is_the_row_that_was_kept_there(case):
    for epoch in case.epochs:
        window = window_of(case)
        held = {key: np.full(count, -1) for key, count in case.slots.items()}
        last = {}
        for plan, wants in plans(window, epoch.batches, case.window):
            for key, part in plan.features.items():
                if part.keep is not None and len(part.keep.positions):
                    held[key][part.keep.slots] = ids_of(last[key])[part.keep.positions]
            for key, want in wants.items():
                fetch = plan.features[key].fetch
                if fetch.num_cached:
                    found = held[key][fetch.cached_slots.numpy()]
                    assert found.tolist() == ids_of(want)[fetch.cached_positions.numpy()].tolist()
            last = wants


@given(case=cases())
def test_invariant_minibatches_are_planned_once_each_and_in_order(case):
    for epoch in case.epochs:
        window = window_of(case)

        planned = list(plans(window, epoch.batches, case.window))

        assert [plan.batch for plan, _ in planned] == list(range(len(epoch.batches)))
        assert all(a is b for (_, a), b in zip(planned, epoch.batches, strict=True))
        for plan, wants in planned:
            assert wants.keys() <= plan.features.keys() <= wants.keys() | case.slots.keys()


def test_a_row_that_repeats_within_a_batch_is_kept_once_and_read_at_every_position():
    window = PlanWindow({NODE: retention("window", 10, 10, 1)})
    batches = [{NODE: Want((torch.tensor([3, 5, 3, 3]),))}] * 2

    (_, _), (second, _) = plans(window, batches, 1)

    part = second.features[NODE]
    assert part.keep.positions.tolist() == [0, 1]
    assert part.fetch.num_home == 0
    slots = part.fetch.cached_slots
    assert slots[0] == slots[2] == slots[3] != slots[1]


def test_a_row_that_repeats_across_layers_is_kept_once_and_read_at_every_position():
    window = PlanWindow({EDGE: retention("window", 10, 10, 1)})
    layers = Want((torch.tensor([7, 2]), torch.tensor([2, 7, 9])), (0, 1))

    (_, _), (second, _) = plans(window, [{EDGE: layers}] * 2, 1)

    part = second.features[EDGE]
    kept = dict(zip(part.keep.slots.tolist(), part.keep.positions.tolist(), strict=True))
    assert sorted(kept.values()) == [0, 1, 4]
    assert [kept[slot] for slot in part.fetch.cached_slots.tolist()] == [0, 1, 1, 0, 4]


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "none"])
def test_a_feature_that_a_minibatch_does_not_want_is_still_kept_for_the_next(policy):
    window = PlanWindow({NODE: retention(policy, 10, 10, 2), OTHER: retention(policy, 10, 10, 2)})
    want = Want((torch.tensor([1, 2]),))
    batches = [{NODE: want, OTHER: want}, {OTHER: want}, {NODE: want}]

    planned = [plan for plan, _ in plans(window, batches, 2)]

    absent = planned[1].features[NODE]
    assert absent.fetch == Fetch(0)
    assert absent.keep.positions.tolist() == [0, 1]
    assert planned[2].features[NODE].fetch.num_home == 0


class UntouchedIds:
    """Ids of which nothing but the number may be asked."""

    def __len__(self):
        return 4


def test_without_a_cache_no_id_is_looked_at():
    window = PlanWindow({})

    ((plan, _),) = plans(window, [{NODE: Want((UntouchedIds(),))}], 2)

    assert plan.features[NODE] == FeaturePlan(Fetch(4), None)
    assert plan.features[NODE].fetch.num_home == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_one_minibatch_beyond_the_lookahead_is_refused(policy):
    window = PlanWindow({NODE: retention(policy, 10, 5, 2)})
    want = {NODE: Want((torch.tensor([1, 2]),))}
    window.push(want)
    window.plan()
    window.push(want)
    window.push(want)

    with pytest.raises(PlanError, match="window is 2"):
        window.push(want)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "none"])
@pytest.mark.parametrize("bad", [-1, 10])
def test_an_id_outside_the_table_is_refused_when_it_becomes_known(policy, bad):
    window = PlanWindow({NODE: retention(policy, 10, 5, 2)})
    window.push({NODE: Want((torch.tensor([1, 2]),))})

    with pytest.raises(FeatureError, match=rf"row {bad} of a table of 10 rows"):
        window.push({NODE: Want((torch.tensor([4, bad]),))})

    assert window.plan().batch == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_distinct_ids_are_numbers_of_64_bits_in_the_order_of_the_sampler(dtype):
    distinct = DistinctIds(Want((torch.tensor([4, 1, 3], dtype=dtype),)))

    assert distinct.ids.dtype == np.int64
    assert distinct.ids.tolist() == [4, 1, 3]


@pytest.mark.parametrize("want", [None, Want(())])
def test_a_feature_that_nobody_wants_has_no_ids(want):
    distinct = DistinctIds(want)

    assert distinct.ids.dtype == np.int64
    assert len(distinct.ids) == 0


def test_merged_ids_lead_back_to_every_position():
    distinct = DistinctIds(Want((torch.tensor([8, 1, 8]), torch.tensor([1, 0]))))

    assert distinct.ids.tolist() == [0, 1, 8]
    spread = distinct.spread(np.array([10, 11, 18], np.int32))
    assert spread.tolist() == [18, 11, 18, 11, 10]
    assert distinct.positions(np.array([2, 0])).tolist() == [0, 4]


def test_near_rows_are_left_out_and_count_as_not_cached():
    ids = Want((torch.tensor([8, 1, 8, 4]), torch.tensor([1, 5])))
    distinct = DistinctIds(ids, is_far=lambda ids: ids >= 4)

    assert distinct.ids.tolist() == [4, 5, 8]
    spread = distinct.spread(np.array([10, 11, 18], np.int32))
    assert spread.tolist() == [18, -1, 18, 10, -1, 11]
    assert distinct.positions(np.array([2, 1])).tolist() == [0, 5]


def test_deciding_takes_time_that_is_reported():
    window = PlanWindow({NODE: retention("window", 10, 5, 1)})
    window.push({NODE: Want((torch.tensor([1, 2]),))})

    assert window.plan().seconds > 0


def test_a_plan_reads_as_what_it_does():
    fetch = Fetch(5, torch.tensor([0, 2, 3]), torch.tensor([1, 4]), torch.tensor([7, 8]))
    keep = Keep(np.array([0, 1, 2]), np.array([4, 5, 6], np.int32))

    plan = Plan(8, {NODE: FeaturePlan(fetch, keep), EDGE: FeaturePlan(Fetch(6))})

    assert str(plan) == (
        "plan 8: node/None/feat: 3 from home, 2 from cache, 3 of 7 kept; "
        "edge/None/weight: 6 from home, 0 from cache"
    )


def test_feature_keys_compare_and_read_as_the_host_names_them():
    assert str(FeatureKey("edge", "a:b:c", "w")) == "edge/a:b:c/w"
    assert len({*KEYS, FeatureKey("node", None, "feat")}) == len(KEYS)
    assert tuple(NODE) == ("node", None, "feat")
