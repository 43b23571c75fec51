"""Distributed and mixed-precision training on machines without a GPU.

mmengine 0.10.7 selects a CUDA device in every process of `--launcher pytorch`, wraps the model with the number
of that device, and refuses mixed precision on CPUs.
"""
import atexit
import functools
import os
import sys
from contextlib import contextmanager

import torch
from mmengine.device import get_device
from mmengine.dist import utils as dist_utils
from mmengine.logging import print_log
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn


@OPTIM_WRAPPERS.register_module()
class CPUAmpOptimWrapper(OptimWrapper):
    """Autocast to bfloat16 on CPUs, where mmengine's AmpOptimWrapper stops.

    bfloat16 has the range of float32: no loss scaling is needed.

    Args:
        **kwargs: Arguments of :class:`mmengine.optim.OptimWrapper`.
    """

    @contextmanager
    def optim_context(self, model):
        """Run the forward pass of `model` in autocast."""
        with super().optim_context(model), torch.autocast('cpu', torch.bfloat16):
            yield


def refuse_sync_norms(model):
    """Stop before several processes train, or test, synchronised norms on CPUs; PyTorch has no such kernels.

    Args:
        model (nn.Module): A model on the CPU that is about to be wrapped.

    Raises:
        ValueError: It has a SyncBatchNorm.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if names:
        raise ValueError(
            "norm_cfg must not be of type 'SyncBN' (nor sync_bn be set) in processes of a launcher without GPUs, got "
            f"{len(names)} of them ({names[0]}, ...): take 'BN', which has the same weights and the statistics of each "
            "process alone, or 'GN', or one process without --launcher, where SyncBN becomes BN")


def leave_process_group():
    """End gloo's threads, which otherwise abort a process that ends before them."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def end_gloo_process():
    """End a process of several that has done its work; without gloo do nothing.

    What still refers to the group, such as the reducer of DDP, keeps gloo's threads alive, and PyTorch's destructors then
    abort the process now and then. They are left out here; functions registered with `atexit` run.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_backend() != 'gloo':
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def enable_cpu_training():
    """Let mmengine's PyTorch launcher and data-parallel wrapper work on CPUs."""
    if hasattr(dist_utils._init_dist_pytorch, '__wrapped__'):
        return
    init_dist = dist_utils._init_dist_pytorch

    @functools.wraps(init_dist)
    def init_dist_pytorch(backend, init_backend='torch', **kwargs):
        if get_device() != 'cpu' or init_backend != 'torch':
            return init_dist(backend, init_backend=init_backend, **kwargs)
        if backend != 'gloo':
            print_log(f'No GPU was found: dist_cfg.backend={backend!r} gives way to gloo', logger='current')
        torch.distributed.init_process_group(backend='gloo', **kwargs)
        atexit.register(leave_process_group)

    dist_utils._init_dist_pytorch = init_dist_pytorch
    init_ddp = MMDistributedDataParallel.__init__

    @functools.wraps(init_ddp)
    def init_data_parallel(self, module, *args, **kwargs):
        if all(p.device.type == 'cpu' for p in module.parameters()):
            kwargs['device_ids'] = None  # what DDP wants for CPU modules
            refuse_sync_norms(module)
        init_ddp(self, module, *args, **kwargs)

    MMDistributedDataParallel.__init__ = init_data_parallel
