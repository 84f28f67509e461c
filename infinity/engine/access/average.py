"""`infinity.EMA`: the program's access to the average of the weights.

Knows the parts of an engine that store values. Must not know how an average is computed, or when it moves.
"""

# [Note: the average in the weights' place]
# `EMA.weights` exchanges the weights and the average of each record, chunk by chunk, and exchanges them again at the end. No second copy is
# made. Each exchange costs as much traffic as the updates of one step: it reads and writes all records. The second exchange restores all bits.
# While the average is in the weights' place, the engine refuses whatever would change or save the training state.

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from infinity.engine.engines import engine_of
from infinity.errors import ConfigError, UsageError
from infinity.system.interrupts import uninterrupted


class EMA:
    """The exponential moving average of a model's weights, in fp32, beside the optimizer states in the tiers.

    Make it before the optimizer. The update of each step also updates the average. The values are those of
    torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) whose update_parameters follows each optimizer step.
    The average begins as a copy of the weights after the first step. Frozen parameters and buffers are their own average. Records grow by 4
    bytes per trained parameter. infinity.save and infinity.load include the average.

    model: inside an engine. decay: from 0 to below 1. Raises ConfigError for another decay or a model in no engine. Raises UsageError if the
    engine has started, or if the model has an EMA.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise ConfigError(f"decay={decay!r}: expected a number from 0 to below 1")
        engine = engine_of(model)
        if engine.averaging.is_kept:
            raise UsageError("the model has an infinity.EMA already, and its records have room for one average")
        if engine.has_started:
            raise UsageError("infinity.EMA after the engine has started and planned records without an average. Make it before the optimizer")
        engine.averaging.begin(float(decay))
        self._engine, self._averaging = engine, engine.averaging

    @property
    def num_averaged(self) -> int:
        """The number of steps that the average contains. Skipped steps do not count."""
        return self._averaging.num_steps

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Inside the block the model has the averaged weights, as for evaluation or model.state_dict(). Afterwards the weights are as before.

        The begin and the end of the block each read and write all records once, as the updates of a step do. All ranks must enter the block.
        Raises UsageError between backward() and step(), and while a module runs. Inside the block, forward passes need torch.no_grad(). The
        engine refuses step(), infinity.save, infinity.load, infinity.gathered and new values of weights there.
        """
        self._prepare("ema.weights()")
        done: list[int] = []
        try:
            self._exchange(done)
            yield
        finally:
            if not self._engine.is_closed:
                self._exchange_back(done)

    @torch.no_grad()
    def state_dict(self) -> dict[str, torch.Tensor]:
        """model.state_dict() with the averaged value of each parameter, in fp32 on the CPU. All ranks must make this call.

        Raises UsageError inside `weights()`, and between backward() and step().
        """
        self._prepare("ema.state_dict()")
        engine, step = self._engine, self._averaging.last_step
        with engine.parameter_values.read_by(lambda param: engine.values.read_average(engine.registry.find(param), step)):
            return engine.model.state_dict()

    def _prepare(self, what: str) -> None:
        """Start the engine. Raise UsageError if the average cannot be read or exchanged now."""
        engine = self._engine
        self._averaging.refuse_exchanged(what)
        engine.start()
        engine.lifecycle.check_between_steps(what)

    @uninterrupted
    @torch.no_grad()
    def _exchange(self, done: list[int]) -> None:
        """Put the average into the weights' place. done: the chunks of which this is done. Before the first step there is no average."""
        settle(self._engine)
        self._averaging.exchange()
        for chunk in self._engine.registry.chunks if self._averaging.num_steps else ():
            if chunk.record.format.averaged:
                self._exchange_in(chunk)
                done.append(chunk.index)

    @uninterrupted
    @torch.no_grad()
    def _exchange_back(self, done: list[int]) -> None:
        """Put the weights back. An interrupted evaluation has left calls of modules without an end."""
        self._engine.cycle.end_interrupted()
        while done:
            self._exchange_in(self._engine.registry.chunks[done[-1]])
            done.pop()
        if self._averaging.is_exchanged:
            self._averaging.exchange()

    def _exchange_in(self, chunk) -> None:
        self._engine.parameter_values.make_way_for_change(chunk, "ema.weights()")
        try:
            self._engine.values.exchange_average(chunk)
        except BaseException as error:  # a part of the chunk may be exchanged: no training may go on
            self._engine.records.failure.note(error)
            raise


@uninterrupted
def settle(engine) -> None:
    """Bring the average of every chunk up to the last step. An update of this step that is announced does this for its chunk."""
    last = engine.averaging.last_step
    for chunk in engine.registry.chunks:
        if chunk.record.format.averaged and not (chunk.update.is_announced and chunk.update.hyper.average == last):
            engine.values.settle_average(chunk, last)
