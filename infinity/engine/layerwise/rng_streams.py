"""A stream of random numbers for each micro-batch.

Knows torch's generators. Must not know threads, modules or engines.
"""

# [Note: random numbers of a micro-batch]
# Each micro-batch has a separate stream. The program's stream is the first one, and seeds the others. So the numbers of a micro-batch
# depend neither on the time and number of other micro-batches nor on the cuts of the model. A checkpoint that spans a pause finds the saved
# state again. After the step, the program's generators go on from the last used stream.

from __future__ import annotations

import hashlib

import torch


class RngState:
    """The state of one stream: a generator's state on the CPU and one on the device."""

    def __init__(self, states: list[torch.Tensor]):
        self.states = states

    @classmethod
    def current(cls, device: torch.device) -> RngState:
        return cls([torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])])

    def derive(self, number: int, device: torch.device) -> RngState:
        """The first state of stream `number`."""
        devices = ["cpu", *([device] if device.type == "cuda" else [])]
        return RngState([torch.Generator(where).manual_seed(_seed(state, number)).get_state() for where, state in zip(devices, self.states)])

    def restore(self, device: torch.device) -> None:
        """Set torch's default generators to this state."""
        torch.set_rng_state(self.states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.states[1], device)

    def __eq__(self, other: object) -> bool:
        return all(map(torch.equal, self.states, other.states))


def rng_streams(num: int, device: torch.device) -> list[RngState]:
    """The first states of num streams."""
    first = RngState.current(device)
    return [first, *(first.derive(index, device) for index in range(1, num))]


def _seed(state: torch.Tensor, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes() + number.to_bytes(4, "little"), digest_size=7).digest(), "little")
