"""Tiers as values: order, names, capacities and properties."""

import dataclasses

import pytest

from infinity.config import CHOICES
from infinity.plan.tiers import DEVICE, HOST, NVME, TIERS, choice_of, in_storage, leaves_device, tier_of, with_capacities


def test_tiers_are_ordered_from_the_fastest():
    assert TIERS == (DEVICE, HOST, NVME) and [tier.name for tier in TIERS] == ["device", "host", "nvme"]


@pytest.mark.parametrize("field", ["param_tier", "optimizer_state_tier", "activation_tier"])
def test_a_configuration_offers_every_tier(field):
    assert [choice_of(name) for name in CHOICES[field]] == [None, *TIERS]


def test_a_tier_has_one_medium():
    for tier in TIERS:
        assert [tier.is_device, tier.is_host, tier.is_storage].count(True) == 1, tier
    assert DEVICE.is_device and HOST.is_host and NVME.is_storage


def test_tiers_with_different_capacities_are_equal():
    device, host, nvme = with_capacities((1 << 30, 2 << 30, None))
    assert (device, host, nvme) == TIERS and {device: "spans"}[DEVICE] == "spans"
    assert (device.capacity_nbytes, nvme.capacity_nbytes) == (1 << 30, None)


def test_capacities_are_needed_for_all_tiers():
    with pytest.raises(ValueError):
        with_capacities((1, 2))


def test_a_tier_prints_in_one_line():
    device, _, nvme = with_capacities((1 << 30, 2 << 30, None))
    assert repr(device) == "Tier(device, device memory, 1.0 GiB)" and repr(nvme) == "Tier(nvme, storage)" and str(nvme) == "nvme"


def test_a_tier_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NVME.capacity_nbytes = 0


def test_an_unknown_tier_name_raises():
    with pytest.raises(KeyError):
        tier_of("tape")


def test_only_host_and_nvme_leave_the_device():
    assert [leaves_device(name) for name in ("auto", "device", "host", "nvme")] == [False, False, True, True]


def test_in_storage_gives_positions_of_storage_homes():
    assert in_storage([NVME, HOST, NVME, DEVICE]) == [0, 2] and not in_storage([HOST, DEVICE])
