"""Memory and bandwidth of transformer training in closed form, from the ZeRO-Infinity paper.

Pure arithmetic, in elements, bytes, seconds and floating-point operations. Must not know this engine.
Source: Rajbhandari et al. 2021 (SC21), sections 3 and 4.
"""

USUAL_STATE_NBYTES = 20
"""Bytes per parameter of mixed-precision Adam: fp16 weight and gradient, fp32 master, gradient, momentum, variance."""


def transformer_parameters(layers: int, hidden: int) -> int:
    """Equation 1: parameters of the blocks."""
    return 12 * layers * hidden**2


def checkpoint_nbytes(*, batch: int, seq: int, hidden: int, layers: int, blocks_between: int = 1) -> int:
    """Equation 3: activation checkpoints in 16 bits, one every `blocks_between` blocks."""
    return 2 * batch * seq * hidden * layers // blocks_between


def model_working_nbytes(hidden: int, *, tiles: int = 1) -> int:
    """Equation 4: weight and gradient, in 16 bits, of the linear from hidden to 4 * hidden, or of one tile."""
    return 4 * hidden * 4 * hidden // tiles


def activation_working_nbytes(*, batch: int, seq: int, hidden: int, heads: int, blocks_between: int = 1) -> int:
    """Equation 5: activations between two checkpoints."""
    return batch * seq * blocks_between * (16 * hidden + 2 * heads * seq)


def step_flops(*, batch: int, seq: int, parameters: int, recompute: bool = True) -> int:
    """Equation 8: forward and backward, and one more forward pass if activations are recomputed."""
    return 2 * (4 if recompute else 3) * batch * seq * parameters


def weights_intensity(*, batch: int, seq: int) -> float:
    """Equation 9: floating-point operations per byte of weights and gradients."""
    return seq * batch


def states_intensity(*, batch: int, seq: int) -> float:
    """Equation 10: floating-point operations per byte of optimizer states."""
    return seq * batch / 4


def activations_intensity(*, hidden: int, blocks_between: int = 1) -> float:
    """Equation 11: floating-point operations per byte of activation checkpoints."""
    return 24 * hidden * blocks_between


def efficiency(intensity: float, bandwidth: float, peak: float) -> float:
    """Equation 6: share of the peak (operations per second) at a bandwidth (bytes per second), without overlap."""
    return intensity * bandwidth / (intensity * bandwidth + peak)


def required_bandwidth(intensity: float, share: float, peak: float) -> float:
    """Bytes per second at which `efficiency` is `share`."""
    return share / (1 - share) * peak / intensity
