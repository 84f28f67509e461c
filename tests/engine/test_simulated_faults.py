"""Seeds of faults: the engine on simulated threads, on a drive that fails, dies or is slow.

A seed decides the training, the order of the threads and the fault, and repeats them exactly. A run ends with the bits of a run without a fault,
or with a SwapError. A run that hangs ends with a Deadlock.
"""

import random
from collections import Counter

import pytest
from support.helpers import assert_same_states
from support.simulated_orders import TRAININGS, train
from support.simulated_storage import simulated_world

import infinity

pytestmark = pytest.mark.usefixtures("one_thread")

MOST_TRANSFERS = 400  # a fault comes before so many transfers


def slow(chance):
    """Latencies of a drive that pauses now and then, for up to a second."""
    return lambda: chance.expovariate(5) if chance.random() < 0.02 else 1e-4


class Fault:
    """What goes wrong: `kind`, from transfer `first` on."""

    KINDS = ("one fails", "dies", "fails now and then", "slow", "slow, then dies")

    def __init__(self, chance):
        self.kind, self.first = chance.choice(self.KINDS), chance.randrange(MOST_TRANSFERS)
        self._chance, self.failed = random.Random(chance.random()), []

    def fails(self, number):
        if self.kind == "one fails":
            failed = number == self.first
        elif self.kind == "fails now and then":
            failed = number >= self.first and self._chance.random() < 0.1
        else:
            failed = "dies" in self.kind and number >= self.first
        self.failed += [number] * failed
        return failed

    @property
    def drive(self):
        return {"fails": self.fails, "latency": slow(self._chance)} if "slow" in self.kind else {"fails": self.fails}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses and states by training, without a fault."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = train(tmp_path_factory.mktemp("undisturbed"), **TRAININGS[name])
        return found[name]

    return of


def play(seed, directory, undisturbed):
    """Run one seed. Returns the kind of the fault and the end: "same" or "refused"."""
    chance = random.Random(seed)
    name, fault = chance.choice(list(TRAININGS)), Fault(chance)
    losses, states = undisturbed(name)
    try:
        with simulated_world(chance.random(), **fault.drive) as (world, _):
            found, after = world.run(lambda: train(directory, **TRAININGS[name]))
    except infinity.SwapError as error:
        assert any(f"transfer {number} fails" in str(error) for number in fault.failed), (seed, name, fault.kind, error)
        return fault.kind, "refused"
    assert found == losses, (seed, name, fault.kind)
    assert_same_states(after, states, f"seed {seed}: {name}, {fault.kind}")
    return fault.kind, "same"


HUNDREDS = [pytest.param(0, id="short"), *(pytest.param(number, marks=pytest.mark.long) for number in range(1, 101))]


@pytest.mark.parametrize("hundred", HUNDREDS)
def test_a_fault_is_an_error_or_changes_nothing(hundred, tmp_path, undisturbed):
    seeds = range(12) if not hundred else range(100 * hundred, 100 * hundred + 100)
    ends = Counter(play(seed, tmp_path, undisturbed) for seed in seeds)
    assert ends["slow", "same"] and not ends["slow", "refused"]
    assert sum(number for (_, end), number in ends.items() if end == "refused") > len(seeds) / 4
