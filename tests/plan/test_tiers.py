"""The tiers as a value: their order, names, capacities and properties."""

import dataclasses

import pytest

from infinity.config import CHOICES
from infinity.plan.tiers import DEVICE, HOST, NVME, TIERS, choice_of, in_storage, leaves_device, tier_of, with_capacities


def test_tiers_are_in_order_the_fastest_first():
    assert TIERS == (DEVICE, HOST, NVME) and [tier.name for tier in TIERS] == ["device", "host", "nvme"]


@pytest.mark.parametrize("field", ["param_tier", "optimizer_state_tier", "activation_tier"])
def test_a_configuration_offers_every_tier(field):
    assert [choice_of(name) for name in CHOICES[field]] == [None, *TIERS]


def test_a_tier_is_of_one_medium():
    for tier in TIERS:
        assert [tier.is_device, tier.is_host, tier.is_storage].count(True) == 1, tier
    assert DEVICE.is_device and HOST.is_host and NVME.is_storage


def test_capacity_is_no_part_of_the_identity():
    device, host, nvme = with_capacities((1 << 30, 2 << 30, None))
    assert (device, host, nvme) == TIERS and {device: "spans"}[DEVICE] == "spans"
    assert (device.capacity_nbytes, nvme.capacity_nbytes) == (1 << 30, None)


def test_capacities_are_of_all_tiers():
    with pytest.raises(ValueError):
        with_capacities((1, 2))


def test_a_tier_prints_in_one_line():
    device, _, nvme = with_capacities((1 << 30, 2 << 30, None))
    assert repr(device) == "Tier(device, device memory, 1.0 GiB)" and repr(nvme) == "Tier(nvme, storage)" and str(nvme) == "nvme"


def test_a_tier_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NVME.capacity_nbytes = 0


def test_an_unknown_name_is_no_tier():
    with pytest.raises(KeyError):
        tier_of("tape")


def test_only_choices_off_the_device_leave_it():
    assert [leaves_device(name) for name in ("auto", "device", "host", "nvme")] == [False, False, True, True]


def test_positions_of_homes_in_storage():
    assert in_storage([NVME, HOST, NVME, DEVICE]) == [0, 2] and not in_storage([HOST, DEVICE])
