"""Run by torchrun: gradients of FSDP, then scripts of mmdet."""
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from mmengine.dist import init_dist
from mmengine.hooks import Hook
from mmengine.model.wrappers import MMFullyShardedDataParallel
from mmengine.registry import HOOKS
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from acmix_det.compat.cpu_training import end_gloo_process
from acmix_det.compat.mmdet_tools import run_mmdet_tool
from tests.test_compat.distributed_gradients import CASES, Loss, gradients


@HOOKS.register_module()
class RecordLosses(Hook):
    """Write the loss of each iteration, one file for each process."""

    def after_train_iter(self, runner, batch_idx, data_batch, outputs):
        path = Path(runner.work_dir) / f'losses_{runner.rank}.json'
        losses = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*losses, outputs['loss'].item()]))


def compare(build):
    """Gradients of two processes with sharded blocks against one's."""
    torch.manual_seed(0)
    model, single = (Loss(build()).double() for _ in range(2))
    for m in (model, single):
        m.train()
    single.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    expected = gradients(single, x)
    rank = dist.get_rank()
    size = sum(p.numel() for p in model.parameters())
    wrapped = MMFullyShardedDataParallel(
        module=model, auto_wrap_policy=dict(type='wrap_blocks'),
        device_id=rank)
    assert sum(p.numel() for p in wrapped.parameters()) < 0.52 * size
    wrapped(x[2 * rank:2 * rank + 2]).backward()
    with FSDP.summon_full_params(wrapped, with_grads=True):
        actual = {key.replace('_fsdp_wrapped_module.', ''): p.grad
                  for key, p in wrapped.named_parameters()}
    for key, value in expected.items():
        assert value is not None, key
        torch.testing.assert_close(actual[key], value, msg=key)
    assert len(expected) > 50
    return len(list(FSDP.fsdp_modules(wrapped)))


def main():
    init_dist('pytorch', backend='nccl')
    for name, build in CASES.items():
        print(f'{name}: equal in {compare(build)} units', flush=True)
    for tool, *args in json.loads(sys.argv[1]):
        run_mmdet_tool(tool, [*args, '--launcher', 'pytorch'])


if __name__ == '__main__':
    main()
    end_gloo_process()
