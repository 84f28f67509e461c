"""The update rules of optimizers: the base class, and the elementwise rules Adam, SGD with momentum, and Lion.

Knows flat tensors, shapes of parameters and hyper-parameters. Must not know chunks, ranks, tiers or the engine. Every operation of an
elementwise rule is one rounding of fp32, so a shard has the same bits on every device and after every cut.
"""

# [Note: how a shard is updated]
# A rule gets an fp32 master, an fp32 gradient and fp32 moments, whatever the record's dtypes. A split master is joined and split again. An
# fp16 weight is rounded from its fp32 master. bf16 and 8-bit moments are widened and stored with stochastic rounding. An elementwise rule runs in
# blocks that fit the processor's cache. For Adam on the host, one kernel does everything in one pass.
#
# [Note: units of a rule]
# An update of one element may depend on other elements: on the whole matrix in Muon, on the norm of the whole parameter in LAMB. A unit is
# the set of elements that one update reads. No shard and no chunk cuts a unit (unit_packing.py). So each rank updates its shard alone. A rule
# of whole matrices or parameters computes on the GPU, if there is one: the units go there in order and come back. So
# all records have the same arithmetic, wherever they rest.

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.formats.format import ADAM_MOMENTS, SCALE_BLOCK, Format, scale_name
from infinity.optim.adam import AdamScalars, Dither, adam_moments, adam_step
from infinity.optim.shard import Shard

_BLOCK_NUMEL = 1 << 16  # a multiple of the block of every storage
_FUSED = ("bf16", "fp32")  # storages that the kernel of Adam reads and writes itself
_DIMENSIONS = {"element": "one dimension", "matrix": "two dimensions", "parameter": "the shape of the parameter"}


UNITS = ("element", "matrix", "parameter")
"""Values of `Rule.unit`."""


def unit_shape(unit: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of one unit of a parameter with this shape; () for elements. A parameter of more than two dimensions is a stack of matrices,
    which are its last two dimensions."""
    return () if unit == "element" else tuple(shape[-2:] if unit == "matrix" else shape)


def planned_moments(rule: Rule, shape: Sequence[int]) -> tuple[str, ...]:
    """The moments of a parameter with this shape, as of `Format.moments`. A moment with fewer values than elements has one value for 2, 4, ...
    or 128 elements, whichever is enough. Raises ConfigError for a moment with more values than the unit has elements."""
    if type(rule).moment_shapes is Rule.moment_shapes:
        return rule.moments
    unit, found = unit_shape(rule.unit, shape), []
    for name, of_moment in rule.moment_shapes(unit).items():
        if math.prod(of_moment) > math.prod(unit):
            raise ConfigError(f"{type(rule).__name__}.moment_shapes: {name} of shape {of_moment} has more values than a unit of shape {unit}")
        block = min(SCALE_BLOCK, 1 << (math.prod(unit) // max(math.prod(of_moment), 1)).bit_length() - 1)
        found.append(name if block == 1 else f"{name}/{block}")
    return tuple(found)


class Rule:
    """An update of weights and moments from gradients. To add an optimizer, write a subclass with the members below.

    moments: names of the states of each element, one record segment each; all zero at the start. unit: what `update` needs at once, one of
    "element", "matrix" (the last two dimensions of a parameter) and "parameter". See [Note: units of a rule]. allows_eight_bit: whether moments
    may be stored in 8 bits. The moment named "variance" is never negative then. All others may lose values that are small beside the largest
    of 128 values: [Note: 8-bit moments] in eight_bit.py.
    """

    moments: tuple[str, ...] = ()
    unit: str = "element"
    allows_eight_bit: bool = False

    def check(self, group: dict) -> list[str]:
        """The errors in a parameter group's hyper-parameters, each as "lr=-1.0: expected 0 or more"."""
        return []

    def scalars(self, group: dict, step: int) -> Any:
        """The factors of `update`, computed once per group and step. step counts from 1."""
        return group

    def moment_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The moments of a unit of this shape, and the shape of each. By default all `moments` have the shape of the unit. A rule with another
        unit than "element" may have smaller moments, as a row and a column of a matrix, or leave moments out. These are stored in fp32.
        """
        return dict.fromkeys(self.moments, shape)

    def update(self, p: torch.Tensor, g: torch.Tensor, moments: dict[str, torch.Tensor], scalars: Any) -> None:
        """Change p and the moments in place. All are fp32; g may be overwritten.

        If the unit is "element", all are 1-D of any length. Use one torch operation per rounding then (no addcmul_, lerp_ or alpha=), and read
        no neighbouring element. Otherwise all have the shape of one matrix, or of the parameter. A vector is a unit of its own shape. Moments
        have the shapes of `moment_shapes`.
        """
        raise NotImplementedError

    # The members below are for the engine.

    @property
    def can_advance(self) -> bool:
        """Whether the moments follow from the previous moments and the gradient alone. The engine calls `advance` only then."""
        return False

    def advance(
        self, shard: dict[str, torch.Tensor], grad: torch.Tensor, scalars: Any, grad_scale: float, *, dither: Dither | None = None
    ) -> None:
        """Update a shard's moments in place like `apply`, and nothing else. Arguments as of `apply`, in host memory."""
        raise NotImplementedError

    @property
    def has_two_parts(self) -> bool:
        """Whether the rule has `apply_weights` and `apply_moments`: one after the other, they do in host memory what `apply` does."""
        return False

    def apply(
        self,
        shard: Shard,
        grad: torch.Tensor,
        scalars: Any,
        grad_scale: float,
        *,
        dither: Dither | None = None,
        threads: int = 0,
        shape: tuple[int, ...] = (),
    ) -> None:
        """Update a shard's segments in place; see [Note: how a shard is updated]. All 1-D [numel] on one device.

        shard: with all segments of its format. grad: bf16, fp16 or fp32, multiplied by grad_scale first. dither: for moments of less than 32
        bits, and for weights without a master. shape: of a unit, unless the unit is an element. The shard has whole units then.
        """
        numel = grad.numel()
        block = _BLOCK_NUMEL if grad.device.type == "cpu" and self.unit == "element" else max(numel, 1)
        for begin in range(0, numel, block):
            part = shard.part(begin, min(begin + block, numel))
            self._apply_block(part, grad[begin : begin + block], scalars, grad_scale, dither, begin, shape)

    @torch.no_grad()
    def _apply_block(self, part, grad, scalars, grad_scale, dither, begin, shape) -> None:
        p = part.masters(threads=1)
        g = grad.float() * grad_scale
        shapes = self.moment_shapes(shape)
        moments = {name: part.moment(name) for name in shapes}
        if self.unit == "element":
            self.update(p, g, moments, scalars)
        else:
            rooms = {segment.name: math.prod(shape) // segment.block for segment in part.format.moment_segments}  # values of one unit
            for index, (weight, gradient) in enumerate(zip(p.view(-1, *shape), g.view(-1, *shape))):  # several only for a stack of matrices
                places = {name: index * rooms[name] for name in shapes}
                views = {name: moments[name][at : at + math.prod(shapes[name])].view(shapes[name]) for name, at in places.items()}
                self.update(weight, gradient, views, scalars)
        for tensor in (p, *moments.values()):
            tensor.masked_fill_(tensor.isnan(), math.nan)  # one NaN for every operation
        part.store(p, moments, None if dither is None else dither.after(begin))


class AdamRule(Rule):
    """AdamW (Loshchilov & Hutter 2019, Algorithm 2) or, coupled, Adam (Kingma & Ba 2015). See [Note: the fixed arithmetic] in _adam.c."""

    moments = ("momentum", "variance")
    allows_eight_bit = True

    def __init__(self, decoupled: bool):
        self.decoupled = decoupled

    def check(self, group):
        return [*wrong_numbers(group, "lr", "eps", "weight_decay"), *_wrong_betas(group["betas"])]

    def scalars(self, group, step):
        names = ("lr", "betas", "eps", "weight_decay")
        return AdamScalars.of(**{name: group[name] for name in names}, step=step, decoupled=self.decoupled)

    def apply(self, shard, grad, scalars, grad_scale, *, dither=None, threads=0):
        self._apply(shard, grad, scalars.scaled(grad_scale), dither, threads=threads)

    def apply_weights(self, shard, grad, scalars, grad_scale, *, dither=None, threads=0):
        """As `apply`, but the moments keep their values."""
        self._apply(shard, grad, scalars.scaled(grad_scale), dither, threads=threads, keeps_moments=True)

    def apply_moments(self, shard, grad, scalars, grad_scale, *, dither=None, threads=0):
        """The rest of `apply` after `apply_weights`. grad: bf16 or fp32."""
        moments = _moments(shard)
        of_moments = None if moments[0].dtype is torch.float32 else dither  # random bits may be for weights alone
        adam_moments(moments, grad, scalars.scaled(grad_scale), dither=of_moments, threads=threads)

    def _apply(self, shard, grad, scalars, dither, **how) -> None:
        if shard.format.name in _FUSED or (shard.format.rounds_weights and shard.format.has_coded_moments):
            adam_step(shard["weight"], shard.get("residual"), _moments(shard), grad, scalars, dither=dither, **how)
            return
        block = _BLOCK_NUMEL * 8 if grad.device.type == "cpu" else max(grad.numel(), 1)
        for begin in range(0, grad.numel(), block):
            part = shard.part(begin, min(begin + block, grad.numel()))
            master, moments = part.masters(), {name: part.moment(name) for name in ADAM_MOMENTS}
            adam_step(master, None, tuple(moments.values()), grad[begin : begin + block].float(), scalars, **how)
            part.store(master, moments, None if dither is None else dither.after(begin))

    @property
    def can_advance(self):
        return self.decoupled and type(self).apply is AdamRule.apply  # a subclass may compute another update

    def advance(self, shard, grad, scalars, grad_scale, *, dither=None):
        self.apply_moments(shard, grad, scalars, grad_scale, dither=dither, threads=1)

    @property
    def has_two_parts(self):
        return self.can_advance


def _moments(shard: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The segments of both moments, 8-bit moments with their scales behind."""
    scales = (shard[name] for name in map(scale_name, ADAM_MOMENTS) if name in shard)
    return *(shard[name] for name in ADAM_MOMENTS), *scales


class SGDRule(Rule):
    """Stochastic gradient descent with weight decay as an L2 term and, if `with_momentum`, a velocity, like torch.optim.SGD."""

    allows_eight_bit = True

    def __init__(self, with_momentum: bool):
        self.moments = ("momentum",) if with_momentum else ()

    def check(self, group):
        found = wrong_numbers(group, "lr", "momentum", "weight_decay")
        if not math.isfinite(group["dampening"]):
            found.append(f"dampening={group['dampening']!r}: expected a finite number")
        if group["nesterov"] and (not group["momentum"] > 0 or group["dampening"]):
            found.append(f"nesterov=True: expected momentum above 0 and no dampening, got {group['momentum']!r}, {group['dampening']!r}")
        if group["momentum"] and not self.moments:
            found.append(f"momentum={group['momentum']!r}: the records were made without momentum; pass momentum > 0 to the constructor")
        return found

    def scalars(self, group, step):
        return {**group, "first": step == 1}

    def update(self, p, g, moments, s):
        if s["weight_decay"]:
            g += p * s["weight_decay"]
        if self.moments and s["momentum"]:
            velocity = moments["momentum"]
            velocity *= s["momentum"]
            velocity += g if s["first"] else g * (1 - s["dampening"])
            g = g + velocity * s["momentum"] if s["nesterov"] else velocity
        p -= g * s["lr"]


class LionRule(Rule):
    """Lion. Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, Program 1."""

    moments = ("momentum",)
    allows_eight_bit = True

    def check(self, group):
        return [*wrong_numbers(group, "lr", "weight_decay"), *_wrong_betas(group["betas"])]

    def update(self, p, g, moments, s):
        (beta1, beta2), m = s["betas"], moments["momentum"]
        p *= 1 - s["lr"] * s["weight_decay"]
        p -= (m * beta1 + g * (1 - beta1)).sign() * s["lr"]
        m *= beta2
        m += g * (1 - beta2)


@contextlib.contextmanager
def failures_named(rule: Rule, group: dict, member: str) -> Iterator[None]:
    """Around a rule's own code, which may be the user's. An error there becomes a ValueError that names the rule and its arguments. If a
    name is unknown, the message says where to declare the name.
    """
    where = f"{type(rule).__name__}.{member}"
    try:
        yield
    except KeyError as error:
        (name,) = error.args or ("",)
        known = f"the hyper-parameters are {', '.join(group) or 'none'}, the moments {', '.join(rule.moments) or 'none'}"
        raise ValueError(
            f"{where} asks for {name!r}, but {known}. Give a hyper-parameter among the optimizer's defaults ({{{name!r}: ...}}), or name a "
            f"moment in {type(rule).__name__}.moments."
        ) from error
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in group.items())
        raise ValueError(
            f"{where} failed with hyper-parameters {given or 'none'}, of fp32 tensors with {_DIMENSIONS[rule.unit]}: "
            f"{type(error).__name__}: {error}. "
            f"Correct these values, or the rule at the place in the traceback above."
        ) from error


def check_rule(rule: Rule, group: dict) -> None:
    """Raise ValueError if a rule changes nothing, or fails, in three updates of a sample. Updates of an elementwise rule, whole and in parts,
    must give equal bits.
    """
    is_elementwise = rule.unit == "element"
    shape = () if is_elementwise else (16, 32)
    generator = torch.Generator().manual_seed(0)
    usual = {"dtype": torch.float32, "device": "cpu"}  # whatever the program's defaults
    powers = [torch.randint(-6, 7, (512,), generator=generator, device="cpu") for _ in range(3)]
    grads = [torch.randn(512, generator=generator, **usual) * 10**power for power in powers]
    start = torch.randn(512, generator=generator, **usual)
    found = []
    for parts in ([slice(0, 512)], [slice(0, 100), slice(100, 511), slice(511, 512)] if is_elementwise else [slice(0, 512)]):
        format = Format("fp32", moments=planned_moments(rule, shape))
        segments = {"weight": start.clone()} | {each.name: torch.zeros(each.count(512), **usual) for each in format.moment_segments}
        shard = Shard(format, segments)
        for step, grad in enumerate(grads, start=1):
            for part in parts:
                of_part = shard.part(part.start, part.stop)
                with failures_named(rule, group, "scalars"):
                    scalars = rule.scalars(group, step)
                with failures_named(rule, group, "update"):
                    rule.apply(of_part, grad[part].clone(), scalars, 1.0, threads=1, **({} if is_elementwise else {"shape": shape}))
        found.append(shard)
    whole, cut = found
    if not all(torch.equal(whole[name].view(torch.int32), cut[name].view(torch.int32)) for name in whole):
        raise ValueError(
            f"{type(rule).__name__} is not elementwise: the update of an element depends on other elements. If an update reads the whole "
            f"matrix, as in Muon, set unit = 'matrix' in the class. If it reads the whole parameter, as in LAMB, set unit = 'parameter'."
        )
    if group.get("lr", 1) and torch.equal(whole["weight"], start) and not any(moment.any() for name, moment in whole.items() if name != "weight"):
        raise ValueError(f"{type(rule).__name__}.update changes neither p nor a moment. Change them in place (p -= ...)")


def wrong_numbers(group: dict, *names: str) -> list[str]:
    return [f"{name}={group[name]!r}: expected 0 or more" for name in names if not 0 <= group[name] < math.inf]


def _wrong_betas(betas: object) -> list[str]:
    if not isinstance(betas, tuple) or len(betas) != 2:
        return [f"betas={betas!r}: expected two numbers"]
    return [f"betas[{i}]={beta!r}: expected from 0 to below 1" for i, beta in enumerate(betas) if not 0 <= beta < 1]
