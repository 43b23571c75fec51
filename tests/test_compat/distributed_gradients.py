"""Run by torchrun: gradients of two processes against those of one."""
import torch
import torch.distributed as dist
from mmengine.dist import init_dist
from mmengine.model import MMDistributedDataParallel
from torch import nn

from acmix_det.compat.cpu_training import end_gloo_process
from acmix_det.models import (ACmixPyramidVisionTransformer, ACmixResNet,
                              ACmixSAN, ACmixSwinTransformer, SASAFPN)


class Detector(nn.Module):
    """A ResNet and an FPN with attention."""

    def __init__(self, **kwargs):
        super().__init__()
        self.backbone = ACmixResNet(
            26, base_channels=8, norm_cfg=dict(type='GN', num_groups=4),
            norm_eval=False, stem_channels=8, **kwargs)
        self.neck = SASAFPN([32, 64, 128, 256], 16, 5)

    def forward(self, x):
        return self.neck(self.backbone(x))


class Loss(nn.Module):

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return sum(y.square().mean() for y in self.model(x))


def gradients(model, x):
    model(x).backward()
    return {k: p.grad for k, p in model.named_parameters() if p.requires_grad}


CASES = {
    'plain': Detector,
    'checkpointing': lambda: Detector(with_cp=True),
    'frozen stage': lambda: Detector(
        with_cp=True, frozen_stages=1,
        stage_with_attn=(False, True, True, True)),
    'swin': lambda: ACmixSwinTransformer(
        embed_dims=12, depths=(1, 2, 1, 1), num_heads=(1, 2, 2, 2),
        drop_path_rate=0., with_cp=True),
    'pvt': lambda: ACmixPyramidVisionTransformer(
        num_layers=(1, 1, 1, 1), embed_dims=8, num_heads=(1, 2, 2, 2),
        drop_path_rate=0.),
    # statistics of half a batch are others: norms keep theirs
    'san': lambda: ACmixSAN(10, norm_eval=True),
}


def compare(build):
    torch.manual_seed(0)
    model, single = (Loss(build()).double() for _ in range(2))
    for m in (model, single):
        m.train()
    single.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    expected = gradients(single, x)
    rank = dist.get_rank()
    wrapped = MMDistributedDataParallel(module=model, device_ids=[rank],
                                        broadcast_buffers=False)
    actual = gradients(wrapped, x[2 * rank:2 * rank + 2])
    for key, value in expected.items():
        assert value is not None, key
        torch.testing.assert_close(actual[f'module.{key}'], value, msg=key)
    assert len(expected) > 50


def main():
    init_dist('pytorch', backend='nccl')
    assert dist.get_backend() == 'gloo'
    for name, build in CASES.items():
        compare(build)
        print(f'{name}: equal', flush=True)


if __name__ == '__main__':
    main()
    end_gloo_process()
