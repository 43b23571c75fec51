import pytest
import torch
from mmengine.analysis import FlopAnalyzer
from torch.utils.flop_counter import FlopCounterMode

from acmix_det.layers import ACmix2d, StandAloneSelfAttention2d


@pytest.mark.parametrize('layer', [
    StandAloneSelfAttention2d(16, 16, 3, padding=1, num_heads=4),
    StandAloneSelfAttention2d(16, 16, 3, padding=1, position='none'),
    StandAloneSelfAttention2d(16, 16, 3, padding=1, use_key=False),
    ACmix2d(16, 16, 3, stride=2, padding=1),
], ids=['relative', 'none', 'no key', 'acmix'])
@pytest.mark.parametrize('size', [(9, 10), (1, 1)])
def test_mmengine_counts_attention_as_torch_does(layer, size):
    x = torch.rand(1, 16, *size)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    expected = counter.get_flop_counts()['Global'][
        torch.ops.acmix_det.local_attention] // 2
    counts = FlopAnalyzer(layer, x).by_operator()
    assert counts['local_attention'] == expected > 0
