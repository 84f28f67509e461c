"""Changes of an engine's optimizers: one joins, replaces others, or gets new parameter groups.

Knows optimizers, the records that the engine has planned, and whether the engine trains. Must not know how updates are computed.
"""

from __future__ import annotations

from infinity.engine.sizing import Training, records_may_visit
from infinity.engine.steps.joined_optimizers import JoinedOptimizers
from infinity.engine.steps.refusals import BETWEEN_STEPS, has_optimizer, planned_otherwise, refuse_groups
from infinity.engine.steps.step_state import EMPTY
from infinity.errors import ConfigError, UsageError
from infinity.optim.loss_scale import LossScale, Scaler


def attach(engine, optimizer) -> None:
    """Take an optimizer. It joins the others, and replaces those whose parameters it has, if the model is not trained yet.

    The engine starts if all trainable parameters have an optimizer now. Otherwise more optimizers may follow, and the engine starts with the
    first call that needs it. Raises ConfigError or UsageError, and changes nothing, if the optimizer does not fit.
    """
    joined, replaced = engine.optimizers.joined_by(optimizer, _trained(engine))
    if replaced and engine.has_started and engine.cycle.has_trained:
        raise UsageError(has_optimizer(replaced[0].made_at))
    _take(engine, joined)
    for each in replaced:
        each.be_replaced(optimizer.made_at)


def add_groups(engine, optimizer, groups: list[dict]) -> None:
    """Take new parameter groups of an optimizer, which are its last ones. Raises ConfigError or UsageError, and changes nothing, if the engine
    has no records for them."""
    engine.optimizers.refuse_shared(optimizer, _trained(engine))
    if engine.has_started:
        pairs = [(engine.registry.find(param), optimizer.rule_of(group)) for group in groups for param in group["params"]]
        refuse_groups([(state, rule) for state, rule in pairs if state is not None], engine.layout)
    _take(engine, JoinedOptimizers(engine.optimizers.members))


def give(engine) -> None:
    """Give the optimizers, and the group of each parameter, to the parts of an engine that has started. They count from the next step on."""
    if not engine.optimizers:
        return
    scaler, settings = engine.cycle.scaler, engine.optimizers.loss_scale or LossScale()
    if engine.dtypes.needs_loss_scale and (scaler is None or scaler.settings != settings):
        scaler = Scaler(settings, engine.ranks.world)
    engine.cycle.attach(engine.optimizers, scaler)
    if records_may_visit(engine.config, engine.layout):
        engine.device_budget.hold_records()
    groups = {id(param): index for index, group in enumerate(engine.optimizers.param_groups) for param in group["params"]}
    for state in engine.registry.params:
        state.group = groups.get(id(state.param))


def _take(engine, optimizers: JoinedOptimizers) -> None:
    """Take optimizers and groups instead of the present ones."""
    before, had_started = engine.optimizers, engine.has_started
    engine.set_optimizers(optimizers)
    try:
        optimizers.check_options()
        scales_loss = engine.dtypes.needs_loss_scale
        training = Training.of(optimizers, engine.config, scales_loss=scales_loss, averages=engine.averaging.is_kept)
        if had_started and not training.has_the_records_of(engine.training, (state.param for state in engine.registry.params)):
            raise UsageError(planned_otherwise(before.made_at if before else None))
        if optimizers.loss_scale is not None and not scales_loss:
            raise ConfigError(f"loss_scale with dtype={engine.config.dtype!r}: only fp16 gradients need a loss scale; leave it out")
        if had_started and engine.cycle.has_trained:
            if engine.cycle.state.phase is not EMPTY:
                raise UsageError(BETWEEN_STEPS)
            engine.flush()  # announced updates know the groups that they had
        elif not had_started and not _trained(engine).keys() - {id(param) for group in optimizers.param_groups for param in group["params"]}:
            engine.start()
    except BaseException:
        engine.set_optimizers(before)
        raise
    optimizers.refer_to(None)
    if had_started:
        give(engine)


def _trained(engine) -> dict[int, str]:
    """Names of the parameters that train, by id: those that did when the engine started."""
    if engine.has_started:
        return {id(state.param): state.name for state in engine.registry.params if state.trainable}
    return engine.parameter_values.trained()
