"""Training with sharded parameters: FSDPStrategy of mmengine's FlexibleRunner.

mmengine 0.10.7 names a CUDA device to FSDP, clips the gradients of each process by the norm of its own shards
alone, and restores the optimizer with the order of arguments of torch 2.0. Its FlexibleRunner writes an epoch too
many into the checkpoint of an epoch that was the best (`save_best`), so that a resumed training skips one.
"""
import functools
from typing import Optional, Sequence

import torch
from mmengine import _strategy
from mmengine.device import get_device
from mmengine.model import BaseModel
from mmengine.model.wrappers import MMFullyShardedDataParallel
from mmengine.registry import FUNCTIONS
from mmengine.runner import FlexibleRunner
from torch import nn

from .cpu_training import refuse_sync_norms
from .faults import FaultError

# What our backbones and those that they replace repeat.
BLOCKS = ('ACmixPVTEncoderLayer', 'ACmixSwinBlock', 'BasicBlock', 'Bottleneck', 'PVTEncoderLayer', 'SANBlock',
          'SwinBlock')


@FUNCTIONS.register_module()
def wrap_blocks(module: nn.Module, recurse: bool, nonwrapped_numel: int,
                blocks: Optional[Sequence[str]] = None) -> bool:
    """Policy of FSDP that shards a detector block by block; the rest is a unit of its own.

    In a config: `auto_wrap_policy=dict(type='wrap_blocks')`, or with `blocks=['Bottleneck']`.

    Args:
        module (nn.Module): A module of the detector.
        recurse (bool): Whether FSDP asks if it has to look into the module, or if it has to wrap it.
        nonwrapped_numel (int): Number of parameters in no unit yet. Not used.
        blocks (Sequence[str] | None): Names of the classes to wrap; derived classes count too. Defaults to None,
            the blocks of our backbones and of those that they replace.

    Returns:
        bool: The answer.

    Raises:
        TypeError: If `blocks` is a string or holds something else than strings.
        ValueError: If the detector has no module of such a class.
    """
    if blocks is not None and (isinstance(blocks, str) or not all(isinstance(b, str) for b in blocks)):
        raise TypeError(f'blocks must be a list of class names, got {blocks!r}')
    if not recurse:
        return bool(_names(module) & set(BLOCKS if blocks is None else blocks))
    if isinstance(module, BaseModel):  # the whole detector
        found = set().union(*map(_names, module.modules()))
        missing = [name for name in blocks or () if name not in found]
        if missing or not found & set(BLOCKS if blocks is None else blocks):
            raise ValueError(f'blocks must be classes of modules in the {type(module).__name__}, got '
                             f'{missing or list(BLOCKS if blocks is None else blocks)}')
    return True


def _names(module):
    return {cls.__name__ for cls in type(module).__mro__}


def clip_sharded_gradients(optim_wrapper, model):
    """Clip by the norm of all gradients. Every process takes part, also one without gradients."""
    norm = model.clip_grad_norm_(**optim_wrapper.clip_grad_kwargs)
    optim_wrapper.message_hub.update_scalar(f'train/{optim_wrapper.grad_name}', float(norm))


def enable_sharded_training():
    """Let mmengine's wrapper work on CPUs, its strategy clip by the whole norm, and both resume where they were."""
    if hasattr(MMFullyShardedDataParallel.__init__, '__wrapped__') or not hasattr(_strategy, 'FSDPStrategy'):
        return
    _mend_wrapper()
    _mend_strategy(_strategy.FSDPStrategy)
    _mend_runner()


def _mend_wrapper():
    init = MMFullyShardedDataParallel.__init__

    @functools.wraps(init)
    def init_sharded_data_parallel(self, module, *args, **kwargs):
        if not torch.distributed.is_initialized():
            raise FaultError("launcher must be 'pytorch', 'slurm' or 'mpi' with FSDPStrategy, also for one process "
                             '(torchrun --nproc_per_node=1 tools/train.py CONFIG --launcher pytorch), got none')
        if get_device() == 'cpu':
            kwargs['device_id'] = torch.device('cpu')
            refuse_sync_norms(module)
        init(self, module, *args, **kwargs)

    MMFullyShardedDataParallel.__init__ = init_sharded_data_parallel


def _mend_strategy(strategy):
    choose = strategy._init_state_dict_cfg

    @functools.wraps(choose)
    def init_state_dict_cfg(self, state_dict_cfg):
        choose(self, state_dict_cfg)
        if get_device() == 'cpu':  # there is nothing to offload, and torch 2.6 crashes over it
            self.state_dict_config.offload_to_cpu = self.optim_state_dict_config.offload_to_cpu = False

    build = strategy.build_optim_wrapper

    @functools.wraps(build)
    def build_optim_wrapper(self, optim_wrapper, model=None):
        built = build(self, optim_wrapper, model)
        if getattr(built, 'clip_func', None) is torch.nn.utils.clip_grad_norm_:
            built._clip_grad = functools.partial(clip_sharded_gradients, built, model)
        return built

    @functools.wraps(strategy.load_optim_state_dict)
    def load_optim_state_dict(self, state_dict):
        if any(isinstance(key, int) for key in state_dict['state']):  # FSDP's go by name
            raise FaultError('--resume must get a checkpoint of a training with FSDPStrategy, got one without it; '
                             'load_from takes its weights, and a new optimizer')
        optimizer = self.optim_wrapper.optimizer
        self.optim_wrapper.load_state_dict(MMFullyShardedDataParallel.optim_state_dict_to_load(
            model=self.model, optim=optimizer, optim_state_dict=state_dict))

    strategy._init_state_dict_cfg = init_state_dict_cfg
    strategy.build_optim_wrapper = build_optim_wrapper
    strategy.load_optim_state_dict = load_optim_state_dict


def _mend_runner():
    save = FlexibleRunner.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(self, *args, **kwargs):
        given = dict(kwargs.get('meta') or {})  # epoch and iter of the hook, which mmengine's Runner respects
        write = self.strategy.save_checkpoint

        def write_as_given(*args, extra_ckpt, **kwargs):
            extra_ckpt['meta'].update(given)
            write(*args, extra_ckpt=extra_ckpt, **kwargs)

        self.strategy.save_checkpoint = write_as_given
        try:
            save(self, *args, **kwargs)
        finally:
            del self.strategy.save_checkpoint

    FlexibleRunner.save_checkpoint = save_checkpoint
