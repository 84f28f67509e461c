"""Prepares engines to train a model: infinity, FSDP2, DeepSpeed, and plain PyTorch with fp32 masters.

Knows how to configure each engine, and the calls of a step. Must not know the model, the measurements, or their display.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from _common import RunError
from torch import nn

import infinity
from infinity.system import drives

ABSENT = ("deepspeed is not installed", "runs on one rank only")  # reasons of engines that cannot run, which is no failure
TRAFFIC = ("NVMe read", "written", "to device", "from it")  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The training job of a run."""

    make: Callable[[], nn.Module]
    """The model on the device, (inputs, targets) -> loss, with the same initial weights for every engine."""

    blocks: Callable[[nn.Module], Iterable[nn.Module]]
    """The modules that FSDP2 fetches as one."""

    device: torch.device
    dtype: str  # bf16 or fp32
    place: str  # tier of the states: nvme, host, device; for infinity the config decides
    nvme: str
    micro_batch: int
    hyper: Mapping[str, object]  # of AdamW
    accumulation: int = 1
    clip: float | None = None
    config: Mapping[str, object] = dataclasses.field(default_factory=dict)  # of infinity
    window: int | None = None
    trace: str | None = None


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A step is `micro` for each micro-batch, or `micros` for all at once if it exists, then `update`."""

    micro: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # inputs, targets -> loss, backward included
    update: Callable[[], None]
    moved: Callable[[], tuple]  # bytes so far of each of TRAFFIC, None if unknown
    close: Callable[[], None] = lambda: None
    micros: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], list[torch.Tensor]] | None = None
    remarks: Callable[[], list[str]] = list  # remarks for readers of the times
    save_trace: Callable[[], None] = lambda: None  # saves the trace so far, if one is recorded

    def passes(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Run all forward and backward passes of a step. Returns the losses."""
        return [self.micro(*batch) for batch in batches] if self.micros is None else self.micros(batches)


@contextlib.contextmanager
def folder_on(nvme: str, name: str) -> Iterator[str]:
    """A separate directory for one run, with the drive's settings if `nvme` has any."""
    with tempfile.TemporaryDirectory(dir=nvme, prefix=f"{name}-") as folder:
        if (tuned := Path(nvme, drives.CACHE_NAME)).exists():
            shutil.copy(tuned, folder)
        yield str(Path(folder).resolve())


def check_can_run(engine: str, ranks: int, device: str) -> None:
    """Raises RunError with one of ABSENT."""
    if engine == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise RunError(ABSENT[0])
    if engine == "plain" and ranks > 1:
        raise RunError(ABSENT[1])
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"


def join(engine: str, kind: str, backend: str | None) -> torch.device:
    """The device of this rank. Joins the process group if there is a backend."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if engine == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(backend)
    elif backend is not None:
        dist.init_process_group(backend)
    return device


def kernel_io() -> tuple[int, int]:
    """Bytes read and written for this process so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def host_peak_nbytes() -> int:
    """The most resident host memory of this process."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def version_of(engine: str) -> str:
    """The version for display; "" for PyTorch's own engines, and for this package."""
    return importlib.metadata.version("deepspeed") if engine == "deepspeed" else ""


def make_ready(engine: str, job: Job) -> Trainer:
    ours = {"infinity": _infinity, "by-layer": _by_layer, "muon": _muon}
    return (ours | {"fsdp2": _fsdp2, "deepspeed": _deepspeed, "plain": _plain, "compute": _compute})[engine](job)


def _infinity(job: Job, *, by_layer: bool = False, kind: type[infinity.Optimizer] = infinity.AdamW) -> Trainer:
    with infinity.init(infinity.Config(trace=bool(job.trace), **job.config), window=job.window):
        model = job.make()
    hyper = job.hyper if kind is infinity.AdamW else {"lr": job.hyper["lr"], "adjust_lr_fn": "match_rms_adamw"}
    optimizer = kind(model.parameters(), **hyper, max_grad_norm=job.clip, accumulation_steps=job.accumulation)
    engine = infinity.engine_of(model)

    def moved():
        stats = engine.stats()
        links = [stats["links"][link]["nbytes"] if job.place != "device" else 0 for link in ("h2d", "d2h")]
        return stats["nvme_read_nbytes"], stats["nvme_write_nbytes"], *links

    def save_trace():
        if job.trace:
            infinity.save_trace(job.trace, model)

    def update():
        optimizer.step()
        optimizer.zero_grad()

    def micros(batches):
        losses = infinity.accumulate(model, batches, lambda model, batch: model(*batch) / job.accumulation)
        return [loss * job.accumulation for loss in losses]

    def remarks():
        stats = engine.stats()
        away = (stats["activation_offload"] or {}).get("moved_nbytes", 0)
        found = list(stats["layerwise_unsplit_reasons"])
        if away:
            found.append(f"{away / 1e9:.1f} GB of activations have left the device")
        return found

    return Trainer(_micro(job, model), update, moved, engine.close, micros if by_layer else None, remarks, save_trace)


def _muon(job: Job) -> Trainer:
    return _infinity(job, kind=infinity.Muon)


def _by_layer(job: Job) -> Trainer:
    return _infinity(job, by_layer=True)


def _fsdp2(job: Job) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model, kind = job.make(), job.device.type
    if job.place == "host":
        model.cpu()
    model.float()
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    policies = {
        "mesh": init_device_mesh(kind, (dist.get_world_size(),)),
        "mp_policy": bf16 if job.dtype == "bf16" else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=kind == "cuda") if job.place == "host" else OffloadPolicy(),
    }
    blocks = list(job.blocks(model))
    for block in blocks:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), **job.hyper, fused=True)
    shards = {id(param): 4 * param.to_local().numel() for param in model.parameters()}
    of_blocks = sum(shards[id(param)] for block in blocks for param in block.parameters())
    pass_, num_passes = _micro(job, model), 0

    def micro(x, y):
        nonlocal num_passes
        num_passes += 1
        return pass_(x, y)

    def update():
        if job.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad()

    def moved():
        if job.place == "device":
            return *kernel_io(), 0, 0
        return *kernel_io(), num_passes * (sum(shards.values()) + of_blocks), num_passes * sum(shards.values())

    return Trainer(micro, update, moved)


def _deepspeed(job: Job) -> Trainer:
    import deepspeed

    if job.place == "nvme":
        _read_ahead_once()
    model, world = job.make().cpu(), dist.get_world_size()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    largest = max(param.numel() for param in model.parameters())
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if job.place != "device":
        offload = {"device": "cpu" if job.place == "host" else "nvme", "nvme_path": job.nvme, "pin_memory": job.device.type == "cuda"}
        zero["offload_param"] = offload | {"buffer_count": 40, "buffer_size": largest // world * 5 // 4, "max_in_cpu": 0}
        zero["offload_optimizer"] = offload | {"buffer_count": 16, "pipeline_read": True, "pipeline_write": True}
    settings = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True, "thread_count": 1},
        "optimizer": {"type": "AdamW", "params": dict(job.hyper)},
        "bf16": {"enabled": job.dtype == "bf16"},
        "gradient_clipping": job.clip or 0.0,  # DeepSpeed clips by default
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for name, buffer in engine.module.named_buffers():  # such as position frequencies, which DeepSpeed has rounded to bf16
        buffer.data = buffers[name].to(buffer.device)

    def micro(x, y):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()  # updates after the last micro-batch of a step
        return loss.detach()

    links = (0, 0) if job.place == "device" else (None, None)
    return Trainer(micro, lambda: None, lambda: (*kernel_io(), *links))


def _read_ahead_once() -> None:
    """Let DeepSpeed read a weight into one buffer if its prefetch list names the weight several times."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper as Swapper

    swap_in = Swapper.swap_in
    Swapper.swap_in = lambda self, params, *rest, **named: swap_in(self, list(dict.fromkeys(params)), *rest, **named)


def _plain(job: Job) -> Trainer:
    model = job.make()
    params = masters = list(model.parameters())
    if job.dtype == "bf16":
        masters = [param.detach().to(torch.float32, copy=True) for param in params]
        for param in params:
            param.data = param.data.bfloat16()
    optimizer = torch.optim.AdamW(masters, **job.hyper, fused=True)
    pass_ = _micro(job, model)

    def micro(x, y):
        loss = pass_(x, y)
        if job.dtype == "bf16":
            for master, param in zip(masters, params):
                master.grad = param.grad.float() if master.grad is None else master.grad.add_(param.grad)
                param.grad = None
        return loss

    def update():
        if job.clip is not None:
            nn.utils.clip_grad_norm_(masters, job.clip)
        optimizer.step()
        optimizer.zero_grad()
        if job.dtype == "bf16":
            with torch.no_grad():
                torch._foreach_copy_(params, masters)

    return Trainer(micro, update, lambda: (*kernel_io(), 0, 0))


def _compute(job: Job) -> Trainer:
    """Forward and backward passes of plain PyTorch on the device. Gradients are dropped, and nothing is updated."""
    model = job.make()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_drop_gradient)
    return Trainer(_micro(job, model), lambda: None, lambda: (*kernel_io(), 0, 0))


def _drop_gradient(param: torch.Tensor) -> None:
    param.grad = None


def _micro(job: Job, model: nn.Module):
    """Forward and backward of a micro-batch, whose loss has its share of the step's weight."""

    def micro(x, y):
        loss = model(x, y)
        (loss / job.accumulation if job.accumulation > 1 else loss).backward()
        return loss.detach()

    return micro
