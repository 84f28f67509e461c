"""Steps that differ in the order, number or choice of modules, on one rank and on several. Ranks that diverge.

Allowed differences have the numbers of plain PyTorch, and fetches run ahead again. Others end soon in a typed error. Long because one rank
and several ranks share the same few models, orders and processes.
"""

import random
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support.helpers import NVME, assert_equals_reference, least_device_memory, plain, training
from support.mixtures import CHOICES, LAYER_NBYTES, MIXTURES, NUM_BLOCKS, ON_RANKS, H, Mixture, batch, chosen
from support.ranks import World, ranks, share, total
from torch import nn

import infinity
from infinity.system.failure_watch import Board
from infinity.system.missing_ranks import Peer
from infinity.tiers.route_position import MAX_ROUTES

pytestmark = pytest.mark.usefixtures("one_thread")

DEPTH = 8


class Layers(nn.Module):
    """Runs the layers in the order of the argument."""

    def __init__(self, depth=DEPTH):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(depth))

    def forward(self, x, order):
        for index in order:
            x = x + torch.tanh(self.layers[index](x))
        return x.square().mean()


UP, DOWN = list(range(DEPTH)), list(reversed(range(DEPTH)))


def _every_other(step):
    return UP if step % 2 else DOWN


def _shared_beginning(step):
    return UP if step % 2 else [0, 1, 2, 7, 5, 6]


def _a_part(step):
    return UP if step % 2 else UP[:4]


def _dropped(step):
    choose = random.Random(step)
    return [index for index in UP if choose.random() > 0.3] or [0]


def _early_exit(step):
    return UP[: random.Random(step).randint(1, DEPTH)]


def _loop(step):
    return [0, *[1, 2] * random.Random(step).randint(1, 4), *UP[3:]]


def _shuffled(step):
    return random.Random(step).sample(UP, DEPTH)


ALTERNATING = {"disjoint first ops": _every_other, "shared beginning": _shared_beginning, "one a part of the other": _a_part}
CHANGING = {"layer drop": _dropped, "early exit": _early_exit, "loop": _loop, "shuffle": _shuffled}
ORDERS = ALTERNATING | CHANGING

TRAININGS = {
    "backward": ({"update": "backward"}, {}),
    "deferred": ({"update": "deferred"}, {}),
    "clip": ({}, {"max_grad_norm": 0.05}),
    "accumulate": ({"update": "backward"}, {"accumulation_steps": 2}),
    "accumulate, clip": ({}, {"accumulation_steps": 2, "max_grad_norm": 0.05}),
}
DEFAULT = {("disjoint first ops", "backward"), ("layer drop", "deferred"), ("early exit", "clip"), ("loop", "accumulate")}
DEFAULT |= {("shuffle", "backward"), ("shuffle", "accumulate, clip"), ("one a part of the other", "accumulate")}


def long_unless(default, *values, name=None):
    return pytest.param(*values, id=name or "-".join(map(str, values)), marks=[] if default else pytest.mark.long)


# ---- one rank: the same bits for every order ----


def run_and_compare(run, tmp_path, make=Layers, num_steps=10, config=None, options=None):
    """`run(model, step, micro)` returns a loss. Losses and all states must have the bits of the reference."""
    config, options = {**NVME, **(config or {})}, options or {}
    clip, micros = options.get("max_grad_norm"), options.get("accumulation_steps", 1)
    reference_model, reference = plain(make)
    budget = least_device_memory(make, tmp_path / "least", options=options, **config)
    with training(make, tmp_path / "nvme", options=options, device_memory=budget, **config) as (model, engine, optimizer):
        for step in range(num_steps):
            scale = 1.0
            for side in (model, reference_model):
                losses = []
                for micro in range(micros):
                    loss = run(side, step, micro) / micros
                    loss.backward()
                    losses.append(loss.item())
                if side is model:
                    got, optimizer_ = losses, optimizer
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    assert got == losses, (step, got, losses)
            if clip is not None:
                norm = optimizer_.grad_norm
                mine = torch.stack([p.grad.double().norm() for p in reference_model.parameters() if p.grad is not None]).norm()
                assert norm == pytest.approx(mine.item(), rel=1e-6)
                scale = min(1.0, clip / (norm + 1e-6))
            reference.step(scale)
            reference.zero_grad()
        assert_equals_reference(engine, model, reference_model, reference)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "order, way", [long_unless((order, way) in DEFAULT, order, way) for order in ORDERS for way in TRAININGS]
)
def test_a_changing_order_of_layers_changes_no_bit(order, way, tmp_path):
    config, options = TRAININGS[way]

    def run(model, step, micro):
        return model(batch(step, micro), ORDERS[order](2 * step + micro + step // 3))

    run_and_compare(run, tmp_path, config=config, options=options)


def evaluate_in_between(model, step, micro):
    """Between forward and backward: an evaluation in eval mode without gradients, and a call of one layer."""
    loss = model(batch(step, micro), UP)
    with torch.no_grad():
        model.eval()
        model(batch(50 + step), _shuffled(step))
        model.layers[step % DEPTH](batch(60 + step))
        model.train()
    return loss


def one_layer_alone(model, step, micro):
    """A call of one layer before the model, in the same backward pass."""
    return model(torch.tanh(model.layers[step % DEPTH](batch(step, micro))), _a_part(step))


def trains_and_evaluates(model, step, micro):
    if step % 3:
        model.eval()
        with torch.no_grad():
            model(batch(50 + step), _early_exit(step))
        model.train()
    return model(batch(step, micro), UP if step % 2 else DOWN)


PROGRAMS = [evaluate_in_between, one_layer_alone, trains_and_evaluates]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    "run, way",
    [
        long_unless(way == "backward" or way == "accumulate" and run is not evaluate_in_between, run, way, name=f"{run.__name__}-{way}")
        for run in PROGRAMS
        for way in TRAININGS
    ],
)
def test_evaluations_and_calls_of_single_layers_change_no_bit(run, way, tmp_path):
    config, options = TRAININGS[way]
    run_and_compare(run, tmp_path, config=config, options=options)


# ---- one rank: fetches ahead of ops ----

ROOM = {**NVME, "device_memory": 5 * LAYER_NBYTES}
RESIDENCIES = {"none": ROOM, "ordinary": {**ROOM, "residency": "auto"}}


def shares_ahead(directory, orders, between=None, **config):
    """For each step, the share of fetches that were issued before their op. And the number of plans."""
    with training(Layers, directory, **config) as (model, engine, optimizer):
        found = []
        for step, order in enumerate(orders):
            before = fetched(engine)
            loss = model(batch(step), order)
            if between is not None:
                between(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(share_ahead(before, fetched(engine)))
        assert len(engine.course.routes) <= MAX_ROUTES
        return found, engine.stats()["num_prefetch_plans"]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("order", ALTERNATING)
def test_a_model_that_alternates_is_fetched_ahead_from_the_fourth_step_on(order, residency, tmp_path):
    found, num_plans = shares_ahead(tmp_path, [ALTERNATING[order](step) for step in range(12)], **RESIDENCIES[residency])
    assert min(found[3:]) >= 0.9, found
    assert num_plans == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_constant_order_is_planned_once(residency, tmp_path):
    found, num_plans = shares_ahead(tmp_path, [UP] * 6, **RESIDENCIES[residency])
    assert found[1:] == [1.0] * 5
    assert num_plans == 1


def test_one_different_step_does_not_change_the_expected_route(tmp_path):
    found, num_plans = shares_ahead(tmp_path, [UP] * 4 + [DOWN] + [UP] * 6, **ROOM)
    assert found[1:4] + found[7:] == [1.0] * 7, found
    assert num_plans == 2


def test_a_backward_pass_after_an_evaluation_is_fetched_ahead(tmp_path):
    def evaluate(model):
        with torch.no_grad():
            model(batch(99), UP)

    found, num_plans = shares_ahead(tmp_path, [UP] * 6, evaluate, **ROOM)
    assert min(found[1:]) >= 0.9, found
    assert num_plans == 1


def turned(by):
    return UP[by:] + UP[:by]


@pytest.mark.slow
def test_up_to_max_routes_each_route_is_planned_once(tmp_path):
    found, num_plans = shares_ahead(tmp_path, [turned(step % MAX_ROUTES) for step in range(3 * MAX_ROUTES)], **ROOM)
    assert num_plans == MAX_ROUTES == 8
    assert min(found[MAX_ROUTES + 1 :]) >= 0.9, found


def test_beyond_max_routes_old_routes_are_planned_again(tmp_path):
    shuffled = [_shuffled(step) for step in range(MAX_ROUTES + 4)]
    _, num_plans = shares_ahead(tmp_path, shuffled, **ROOM)
    assert num_plans == MAX_ROUTES + 4


def test_a_known_route_keeps_its_list_of_actions(tmp_path):
    with training(Layers, tmp_path, **ROOM) as (model, engine, optimizer):
        actions = []
        for step in range(6):
            model(batch(step), _every_other(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            actions.append(engine.course.routes[-1].actions)
    assert actions[0] is actions[2] is actions[4] and actions[1] is actions[3] is actions[5]
    assert actions[0] != actions[1]


def test_a_layer_that_runs_twice_is_planned_again_after_one_step(tmp_path):
    order = [index for index in UP for _ in range(2)]
    found, num_plans = shares_ahead(tmp_path, [order] * 6, **ROOM)
    assert num_plans == 2
    assert found[2:] == [1.0] * 4


# ---- infinity.leaf: a mixture of experts ----


def mixture(folder, options, choice, *, steps=6, leaf=True, adam=None, **config):
    """Trains a mixture on every rank. Returns losses over all ranks, weights, and the share fetched ahead in each step."""
    torch.manual_seed(0)
    model = Mixture(leaf=leaf, **options)
    engine = infinity.offload(model, infinity.Config(swap_dirs=folder, **{**ON_RANKS, **config}))
    optimizer = infinity.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **(adam or {}))
    losses, ahead = [], []
    with engine:
        for step in range(steps):
            before = fetched(engine)
            loss = model(share(batch(step)), chosen(step, ranks()[0], choice))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total(loss.item()))
            ahead.append(share_ahead(before, fetched(engine)))
        return losses, {name: engine.read_state(p)["weight"] for name, p in model.named_parameters()}, ahead


def fetched(engine):
    stats = engine.stats()
    return stats["num_prefetch_hits"], stats["num_prefetch_misses"]


def share_ahead(before, after):
    ahead, late = (now - then for now, then in zip(after, before))
    return ahead / max(ahead + late, 1)


def plain_mixture(options, choice, world, steps=6):
    """Plain PyTorch, with the rows of one rank after the other. No checkpoints: they refuse a block that computes nothing."""
    torch.manual_seed(0)
    model = Mixture(leaf=False, **{**options, "checkpoint": None})
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        loss = 0.0
        for rank, rows in enumerate(batch(step).chunk(world)):
            part = model(rows, chosen(step, rank, choice)) / world
            part.backward()
            loss += part.item()
        adam.step()
        adam.zero_grad()
        losses.append(loss)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


MIXED = [
    long_unless((i, choice, update) in [(0, CHOICES[0], "backward"), (3, CHOICES[0], "backward"), (7, CHOICES[1], "deferred")], kind, choice, update)
    for i, kind in enumerate(MIXTURES)
    for choice in CHOICES
    for update in ("backward", "deferred")
]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind, choice, update", MIXED)
def test_ranks_may_choose_different_experts_of_a_leaf(kind, choice, update, two_ranks, tmp_path):
    device_memory = (128 if kind == "root" else 64) * LAYER_NBYTES  # all gradients of the root leaf belong to one op
    found = two_ranks.run(mixture, tmp_path, MIXTURES[kind], choice, update=update, device_memory=device_memory)
    losses, weights = plain_mixture(MIXTURES[kind], choice, 2)
    for got, states, ahead in found:
        assert got == pytest.approx(losses, rel=1e-5)
        for name, weight in states.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=1e-5)
            assert torch.equal(weight, found[0][1][name])
        assert min(ahead[3:]) >= 0.9, ahead


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.long if i % 3 else ()) for i, kind in enumerate(MIXTURES)])
def test_a_leaf_on_one_rank_changes_no_bit(kind, tmp_path):
    choice = CHOICES["reentrant" not in kind]  # PyTorch refuses a reentrant checkpoint that computes nothing

    def run(model, step, micro):
        return model(batch(step, micro), chosen(step, 1, choice))

    run_and_compare(run, tmp_path, make=lambda: Mixture(**MIXTURES[kind]), num_steps=5)


@pytest.mark.parametrize("kind", ["list", "slices", "nested"])
def test_the_least_budget_counts_the_whole_leaf(kind, tmp_path):
    block = Mixture(**MIXTURES[kind]).blocks[0]
    leaf_nbytes = sum(4 * p.numel() for p in block.parameters())
    nbytes = {leaf: least_device_memory(lambda leaf=leaf: Mixture(leaf=leaf, **MIXTURES[kind]), tmp_path, **NVME) for leaf in (True, False)}
    assert nbytes[True] >= max(leaf_nbytes, nbytes[False])


def test_a_leaf_after_the_start_is_refused(tmp_path):
    refused = pytest.raises(infinity.UsageError, match=r"infinity.leaf\(Experts\) after the engine started")
    with training(Mixture, tmp_path) as (model, *_), refused:
        infinity.leaf(model.blocks[0])


# ---- two ranks, the same changes on all ----


def changing(folder, order, *, steps=8, repeat=1, **config):
    """Returns losses over all ranks, weights, the number of plans, and the peak of device bytes from the fourth step on."""
    torch.manual_seed(0)
    model = Layers()
    engine = infinity.offload(model, infinity.Config(swap_dirs=folder, **{**ON_RANKS, "device_memory": 12 * LAYER_NBYTES, **config}))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with engine:
        for step in range(steps):
            if step == 3:
                engine.tier.peak_nbytes = 0
            loss = model(share(batch(step)), [index for index in order(step) for _ in range(repeat)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total(loss.item()))
        states = {name: engine.read_state(p)["weight"] for name, p in model.named_parameters()}
        return losses, states, engine.stats()["num_prefetch_plans"], engine.stats()["peak_device_nbytes"]


def plain_changing(order, steps=8, repeat=1):
    torch.manual_seed(0)
    model = Layers()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(batch(step), [index for index in order(step) for _ in range(repeat)])
        loss.backward()
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "order, update",
    [
        long_unless(i % 2 == 1 and update == "deferred" or i % 4 == 0 and update == "backward", order, update)
        for i, order in enumerate(ORDERS)
        for update in ("backward", "deferred")
    ],
)
def test_two_ranks_in_equal_changing_orders_train_in_bounded_memory(order, update, two_ranks, tmp_path):
    found = two_ranks.run(changing, tmp_path, ORDERS[order], update=update)
    for losses, states, num_plans, peak_nbytes in found:
        assert losses == pytest.approx(plain_changing(ORDERS[order]), rel=1e-5)
        assert all(torch.equal(states[name], found[0][1][name]) for name in states)
        num_orders = len({tuple(ORDERS[order](step)) for step in range(8)})
        assert num_orders <= num_plans <= num_orders + 2 * (order == "loop")  # the second step in an order may show more gradients
        # The spans, and for the next layer's gradients: the gradients, the buffer of their chunk, and the reduction under way.
        assert peak_nbytes <= 12 * LAYER_NBYTES


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(H, H), nn.LSTM(H, H, num_layers=3), nn.Linear(H, H)

    def forward(self, x, order):
        return self.last(self.middle(self.first(x))[0]).square().mean()


SEVERAL = {"layers": Layers, "one op of many": lambda: infinity.leaf(Layers()), "recurrent": Recurrent}


def peak_at_least(folder, kind, **config):
    """The least device memory that the refusal names, and the peaks of steps in this memory."""
    config = {**ON_RANKS, **config, "chunk_mib": 1 / 256}
    with pytest.raises(infinity.BudgetError) as refused:
        model = SEVERAL[kind]()
        infinity.offload(model, infinity.Config(swap_dirs=folder, **{**config, "device_memory": 1024}))
        infinity.AdamW(model.parameters())
    least = int(re.search(r"needs (\d+) bytes", str(refused.value))[1])
    model, peaks = SEVERAL[kind](), []
    with infinity.offload(model, infinity.Config(swap_dirs=folder, **{**config, "device_memory": least})) as engine:
        optimizer = infinity.AdamW(model.parameters())
        for step in range(4):
            model(share(batch(step)), UP).backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(engine.stats()["peak_device_nbytes"])
    return least, peaks


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["backward", "deferred"])
@pytest.mark.parametrize("kind", SEVERAL)
def test_peaks_of_two_ranks_stay_within_the_least_device_memory(kind, update, two_ranks, tmp_path):
    for least, peaks in two_ranks.run(peak_at_least, tmp_path, kind, update=update):
        assert max(peaks) <= least, peaks


def accumulating(folder, orders, **config):
    """Weights after steps of two micro-batches. "p": forward and backward passes in turn. "f": all forward passes first."""
    torch.manual_seed(0)
    model = Layers()
    engine = infinity.offload(model, infinity.Config(swap_dirs=folder, **{**ON_RANKS, **config}))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2, accumulation_steps=2)
    with engine:
        for step, order in enumerate(orders):
            losses = []
            for micro in range(2):
                losses.append(model(share(batch(step, micro)), UP) / 2)
                if order == "p":
                    losses.pop().backward()
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: engine.read_state(p)["weight"] for name, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["backward", "deferred"])
@pytest.mark.parametrize("orders", ["fff", "pffp"])
def test_all_forward_passes_may_come_before_the_backward_passes(orders, update, two_ranks, tmp_path):
    expected = two_ranks.run(accumulating, tmp_path, "p" * len(orders), update=update)[0]
    for found in two_ranks.run(accumulating, tmp_path, orders, update=update):
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["backward", "deferred"])
def test_gradients_of_layers_that_run_twice_leave_the_device(update, two_ranks, tmp_path):
    for losses, _, num_plans, peak_nbytes in two_ranks.run(changing, tmp_path, _unchanged, repeat=2, update=update):
        assert losses == pytest.approx(plain_changing(_unchanged, repeat=2), rel=1e-5)
        assert num_plans == 2
        assert peak_nbytes <= 12 * LAYER_NBYTES


def _unchanged(step):
    return UP


# ---- ranks that diverge ----

SKIPS = [0, 1, 2, 4, 5, 6, 7]


def parting(folder, what, when, update):
    """Rank 1 does something different in step `when`."""
    infinity.system.failure_watch.WATCH_S = 0.1  # five times as many polls: waits are counted in polls
    odd_rank = dist.get_rank() == 1
    torch.manual_seed(0)
    model = Mixture(leaf=False) if what == "experts" else Layers()
    engine = infinity.offload(model, infinity.Config(swap_dirs=folder, update=update, **ON_RANKS))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    with engine:
        for step in range(when + 4):
            odd = odd_rank and step == when
            order = {"skips": SKIPS, "skips the last": UP[:-1], "other order": DOWN}.get(what, UP) if odd else UP
            if odd and what == "extra forward":
                with torch.no_grad():
                    model(batch(1), UP)
            if odd and what == "state_dict":
                model.state_dict()
            if what == "skips, forward only":
                with torch.no_grad():
                    model(batch(1), SKIPS if odd else UP)
            if what == "experts":
                loss = model(batch(step), [[0, 1, 2] if odd else [0, 1, 2, 3]] * NUM_BLOCKS)
            else:
                short = odd and what == "shorter backward"
                hook = model.layers[3].register_forward_hook(lambda *given: given[-1].detach()) if short else None
                loss = model(batch(step), order)
                if hook is not None:
                    hook.remove()
            loss.backward(retain_graph=what == "backward twice")
            if odd and what == "backward twice":
                loss.backward()
            if odd and what == "state_dict before step":
                model.state_dict()
            optimizer.step()
            optimizer.zero_grad()


PARTINGS = ["skips", "skips the last", "skips, forward only", "other order", "extra forward", "state_dict", "experts", "shorter backward"]
LONG_PARTINGS = ["backward twice", "state_dict before step"]
DEFAULT_PARTINGS = {("skips", 0), ("experts", 3), ("shorter backward", 0), ("extra forward", 0), ("state_dict before step", 3)}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "what, when, update",
    [
        long_unless((what, when) in DEFAULT_PARTINGS and update == ("deferred" if "state" in what else "backward"), what, when, update)
        for what in PARTINGS + LONG_PARTINGS
        for when in (0, 3)
        for update in ("backward", "deferred")
    ],
)
def test_ranks_that_diverge_end_within_10_s_in_errors_that_name_a_remedy(what, when, update, tmp_path):
    world = World(2, tmp_path)  # not the shared one: the groups of this world are lost
    try:
        start = time.monotonic()
        answers = world.attempt(parting, tmp_path, what, when, update)
        seconds = time.monotonic() - start
        print(f"{what}, step {when}, {update}: {seconds:.1f} s")
        assert seconds < 10
        for good, answer in answers:
            assert not good
            assert answer.startswith(("UsageError", "PeerError")), answer
            if what == "backward twice" or (what == "state_dict before step" and update == "backward"):  # an error even on one rank
                continue
            assert "infinity.leaf" in answer and "the same modules in the same order" in answer, answer
            assert re.search(r"\((layers|first|last|blocks)\S*\)|numbers|parted in this backward pass", answer), answer
    finally:
        world.close()


# ---- ranks that are slow ----

SLOW_S = 5  # longer than the polls after which ranks count as diverged


def slow(folder, where, update):
    """Rank 1 sleeps once for SLOW_S, at `where`. In one case each rank sleeps in a lane. Slowness itself is tested, hence the sleeps."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Layers()
    engine = infinity.offload(model, infinity.Config(swap_dirs=folder, update=update, **{**ON_RANKS, "device_memory": 12 * LAYER_NBYTES}))
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    pauses = []

    def pause(*_):
        if not pauses:
            pauses.append(time.sleep(SLOW_S))

    with engine:
        for step in range(4):
            if step == 2 and rank == 1:
                if where == "module":
                    model.layers[3].register_forward_hook(pause)
                if where == "backward":
                    model.layers[3].register_full_backward_hook(pause)
                if where == "before the step":
                    pause()
                if where in ("cg", "gg", "gc", "update"):
                    lane = {lane.name: lane for lane in engine.parts.lanes()}[where]
                    lane.on_job = pause
            model(share(batch(step)), UP).backward()
            if step == 2 and where == "copy here, update there":  # both ranks wait, each for its own slow job
                _one_slow_job(engine.weights.lanes.cg if rank == 0 else engine.updater.lane, 0 if rank == 0 else 3)
            optimizer.step()
            optimizer.zero_grad()
            if where == "copy here, update there" and step == 2:
                engine.read_state(model.layers[7].weight)
        return {name: engine.read_state(p)["weight"] for name, p in model.named_parameters()}


def _one_slow_job(lane, number):
    counted = []

    def count():
        counted.append(None)
        if len(counted) == number + 1:
            time.sleep(SLOW_S)

    lane.on_job = count


SLOW = ["module", "before the step", "copy here, update there", "backward", "cg", "gg", "gc", "update"]


@pytest.mark.long
@pytest.mark.parametrize("update", ["backward", "deferred"])
@pytest.mark.parametrize("where", SLOW)
def test_a_slow_rank_does_not_count_as_diverged(where, update, two_ranks, tmp_path):
    states = two_ranks.run(slow, tmp_path, where, update)
    expected = two_ranks.run(slow, tmp_path, "nowhere", update)
    assert all(torch.equal(states[rank][name], expected[0][name]) for rank in range(2) for name in expected[0])


@pytest.mark.slow
def test_three_ranks_with_one_slow_rank_do_not_count_as_diverged(tmp_path):
    world = World(3, tmp_path)
    try:
        states = world.run(slow_of_three, tmp_path)
        assert all(torch.equal(state, states[0]) for state in states)
    finally:
        world.close()


def slow_of_three(folder):
    infinity.system.failure_watch.WATCH_S = 0.1
    torch.manual_seed(0)
    model = Layers()
    pauses = []

    def pause(*_):
        if dist.get_rank() == 2 and len(pauses) < 1:
            pauses.append(time.sleep(2.0))  # twenty polls, of which six are enough to call ranks diverged

    model.layers[3].register_full_backward_hook(pause)
    with infinity.offload(model, infinity.Config(swap_dirs=folder, **{**ON_RANKS, "device_memory": 24 * LAYER_NBYTES})) as engine:
        optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(batch(step), UP).backward()
            optimizer.step()
            optimizer.zero_grad()
        return engine.read_state(model.layers[0].weight)["weight"]


# ---- the collective that a rank reports ----


class Said:
    """A store that is a dictionary."""

    def __init__(self):
        self.texts = {}

    def set(self, key, text):
        self.texts[key] = text.encode()

    def get(self, key):
        return self.texts[key]

    def check(self, keys):
        return all(key in self.texts for key in keys)


class Waiting:
    """One rank of two, as seen by the rank's board: the place of the rank, and the messages of all ranks."""

    def __init__(self, rank, store):
        self.text = ""
        self.board = Board(store, rank, 2, f"rank {rank} of 2", self, self)

    def waits_in(self):
        return self.text

    def look(self):
        return [Peer(where="in step 1")] * 2


def looks(texts):
    """The results of two boards. `texts` are pairs: where each rank is at each poll."""
    store = Said()
    pair = [Waiting(rank, store) for rank in range(2)]
    found = []
    for both in texts:
        for rank, text in zip(pair, both):
            rank.text = text
            found.append(rank.board.look())
    return found


def test_ranks_count_as_diverged_if_all_wait_in_different_collectives():
    assert not any(looks([("a", "a")] * 20))
    assert not any(looks([("a", "")] * 20))
    assert not any(looks([("a", "b")] * 4))
    assert any(looks([("a", "b")] * 6))
    assert not any(looks([("a", "b"), ("a", "b"), ("a", "c")] * 10))  # rank 1 makes progress
    assert not any(looks([("a", "b")] * 4 + [("b", "b")] * 20))


def ranks_alone():
    """The Ranks of a single process, which never communicate."""
    return infinity.system.ranks.Ranks(torch.device("cpu"))


def test_a_rank_reports_a_collective_only_if_its_training_thread_waits():
    alone = ranks_alone()
    with alone._place.inside("lane", "a gather"):
        assert alone._place.waits_in() == ""
        with infinity.system.waits.waits("a job", worker=1):
            assert alone._place.waits_in() == "a gather (number 1)"
    assert alone._place.waits_in() == ""


def test_a_training_thread_that_python_did_not_start_is_seen():
    """Autograd's threads, which run backward passes on CUDA, are not started by Python."""
    import _thread

    alone, found, over = ranks_alone(), [], threading.Event()

    def wait():
        with alone._place.inside("lane", "a gather"), infinity.system.waits.waits("a job", worker=1):
            found.append(alone._place.waits_in())
        over.set()

    _thread.start_new_thread(wait, ())
    assert over.wait(20)
    assert found == ["a gather (number 1)"]
