import copy

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.hub import get_config
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from acmix_det.evaluation import count_complexity
from acmix_det.layers.patchwise import (ACmixPatchwiseAttention2d,
                                        PatchwiseAttention2d, _aggregation_op,
                                        patchwise_aggregation)
from acmix_det.models import SAN, ACmixSAN
from acmix_det.ops import torch_backend
from tests.test_models.test_detectors import batch

BACKBONES = pytest.mark.parametrize('cls', [SAN, ACmixSAN])
BN = dict(type='BN')
SIZES = [(5, 4), (1, 1), (2, 7), (1, 3)]


def small(cls, depth=10, **kwargs):
    torch.manual_seed(0)
    return cls(depth, **{'base_channels': 32, **kwargs})


def layer(cls=PatchwiseAttention2d, in_channels=8, kernel=3, share_planes=2,
          **kwargs):
    """A layer in float64 without a start value that hides something."""
    torch.manual_seed(0)
    module = cls(in_channels, 2, 8, kernel, BN, share_planes=share_planes,
                 **kwargs).double().eval()
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    for m in module.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2.)
    return module


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def bounce(i, size):
    """Index i mirrored at the border pixels, as often as needed."""
    while not 0 <= i < size:
        i = -i if i < 0 else 2 * (size - 1) - i
        if size == 1:
            return 0
    return i


def neighborhood(x, y, x_, kernel):
    """Neighbors of a pixel of (C, H, W), row by row."""
    half = kernel // 2
    return [x[:, bounce(y + dy, x.shape[1]), bounce(x_ + dx, x.shape[2])]
            for dy in range(-half, half + 1) for dx in range(-half, half + 1)]


# classifiers of 1000 classes, less the classification head
@pytest.mark.parametrize('depth, plain, one_set, two_sets', [
    (10, 11_841_124, 11_994_612, 12_147_540),
    (15, 16_181_310, 16_414_134, 16_646_118),
    (19, 20_518_470, 20_829_278, 21_139_022),
])
def test_parameter_counts_are_exact_and_those_of_the_papers(
        depth, plain, one_set, two_sets):
    models = (SAN(depth), ACmixSAN(depth),
              ACmixSAN(depth, attn_cfg=dict(num_shift_sets=2)))
    counts = [sum(p.numel() for p in m.parameters()) + 2048 * 1000 + 1000
              for m in models]
    assert counts == [plain, one_set, two_sets]
    published = {10: (11.8, 12.1), 15: (16.2, 16.6), 19: (20.5, 21.2)}[depth]
    assert plain / 1e6 == pytest.approx(published[0], abs=0.05)
    assert two_sets / 1e6 == pytest.approx(published[1], abs=0.1)


@pytest.mark.parametrize('cls, depth, published', [
    (SAN, 10, 1.9), (SAN, 15, 2.6), (SAN, 19, 3.3),
    (ACmixSAN, 10, 1.9), (ACmixSAN, 15, 2.7), (ACmixSAN, 19, 3.4),
])
def test_flops_are_those_of_the_papers(cls, depth, published):
    # which count biases, norms, ReLU and pooling as well
    model, others = cls(depth).to('meta').eval(), []

    def count(module, inputs, output):
        if isinstance(module, nn.BatchNorm2d):
            others.append(2 * output.numel())
        elif isinstance(module, nn.MaxPool2d):
            others.append(inputs[0].numel())
        elif isinstance(module, nn.ReLU) or (isinstance(module, nn.Conv2d)
                                             and module.bias is not None):
            others.append(output.numel())

    for module in model.modules():
        module.register_forward_hook(count)
    model(torch.empty(1, 3, 224, 224, device='meta'))
    macs = count_complexity(cls(depth), (224, 224)).macs + 2048 * 1000
    assert round((macs + sum(others)) / 1e9, 1) == published


def literal_aggregation(value, weight):
    (c, h, w), (shared, taps) = value.shape, weight.shape[:2]
    kernel = round(taps**0.5)
    out = torch.empty_like(value)
    for y in range(h):
        for x_ in range(w):
            values = neighborhood(value, y, x_, kernel)
            for i in range(c):
                out[i, y, x_] = sum(weight[i % shared, o, y, x_] * v[i]
                                    for o, v in enumerate(values))
    return out


@pytest.mark.parametrize('tile', [1, 1 << 18], ids=['row', 'whole'])
@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('kernel', [1, 3, 7])
def test_aggregation_equals_its_definition_in_loops(kernel, size, tile,
                                                    monkeypatch):
    monkeypatch.setattr(torch_backend, '_TILE_ELEMENTS', tile)
    torch.manual_seed(0)
    value, weight = rand(2, 6, *size), rand(2, 3, kernel**2, *size)
    out = patchwise_aggregation(value, weight)
    for i in range(2):
        assert_close(out[i], literal_aggregation(value[i], weight[i]))


@pytest.mark.parametrize('tile', [1, 1 << 18], ids=['row', 'whole'])
@pytest.mark.parametrize('size', SIZES, ids=str)
def test_gradients_of_the_aggregation(size, tile, monkeypatch):
    monkeypatch.setattr(torch_backend, '_TILE_ELEMENTS', tile)
    torch.manual_seed(0)
    value = rand(2, 4, *size).requires_grad_()
    weight = rand(2, 2, 9, *size).requires_grad_()
    assert torch.autograd.gradcheck(patchwise_aggregation, (value, weight))


def test_aggregation_is_a_sound_operator():
    value = torch.rand(2, 4, 3, 5, requires_grad=True)
    weight = torch.rand(2, 2, 9, 3, 5, requires_grad=True)
    torch.library.opcheck(_aggregation_op, (value, weight))


def test_aggregation_sums_half_types_in_float32():
    torch.manual_seed(0)
    value, weight = torch.rand(1, 4, 9, 9), torch.rand(1, 2, 49, 9, 9)
    value, weight = value.bfloat16(), weight.bfloat16()
    out = patchwise_aggregation(value, weight)
    expected = patchwise_aggregation(value.double(), weight.double())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())


def test_aggregation_counts_as_multiply_adds_forward_and_backward():
    value = torch.rand(2, 4, 3, 5, requires_grad=True)
    weight = torch.rand(2, 2, 9, 3, 5, requires_grad=True)
    flops = 2 * 2 * 4 * 9 * 3 * 5
    with FlopCounterMode(display=False) as counter:
        out = patchwise_aggregation(value, weight)
    assert counter.get_total_flops() == flops
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * flops


def test_exported_aggregation_holds_standard_operators_only():
    class Model(nn.Module):

        def forward(self, value, weight):
            return patchwise_aggregation(value, weight)

    inputs = (torch.rand(1, 4, 6, 5), torch.rand(1, 2, 9, 6, 5))
    program = torch.export.export(Model(), inputs, strict=False)
    assert 'acmix_det' not in str(program.graph)
    assert_close(program.module()(*inputs), patchwise_aggregation(*inputs))


def literal_attention(module, x):
    """The definition pixel by pixel, (Cin, H, W) to (Cout, H, W)."""
    def project(conv):
        return torch.einsum('oc,chw->ohw', conv.weight[..., 0, 0],
                            x) + conv.bias[:, None, None]

    def norm(bn, t):
        t = (t - bn.running_mean) / (bn.running_var + bn.eps).sqrt()
        return (t * bn.weight + bn.bias).relu()

    query, key, value = map(project, (module.query, module.key, module.value))
    first, _, linear1, second, _, linear2 = module.gamma
    kernel = module.attn_kernel_size
    weight = []
    for y in range(x.shape[1]):
        for x_ in range(x.shape[2]):
            relation = torch.cat([query[:, y, x_],
                                  *neighborhood(key, y, x_, kernel)])
            hidden = linear1.weight[..., 0, 0] @ norm(first, relation)
            weight.append(linear2.weight[..., 0, 0] @ norm(second, hidden) +
                          linear2.bias)
    weight = torch.stack(weight, -1).unflatten(1, x.shape[1:]).unflatten(
        0, (-1, kernel**2))
    return literal_aggregation(value, weight)


@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('kernel', [3, 5])
@torch.no_grad()
def test_layer_equals_its_definition_in_loops(kernel, size):
    module = layer(kernel=kernel)
    x = rand(1, 8, *size)
    expected = literal_attention(module, x[0])
    assert expected.abs().mean() > 0.1
    assert_close(module(x)[0], expected)


def test_gradients_of_the_layer():
    module = layer(share_planes=4)
    x = rand(1, 8, 2, 4).requires_grad_()
    names, values = zip(*module.named_parameters())

    def function(x, *values):
        return torch.func.functional_call(module, dict(zip(names, values)), x)

    assert torch.autograd.gradcheck(function, (x, *values), fast_mode=True)


@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize('arguments', [
    {}, dict(conv_kernel_size=1), dict(num_shift_sets=2)], ids=str)
@torch.no_grad()
def test_acmix_adds_a_convolution_of_the_same_projections(size, arguments):
    module = layer(ACmixPatchwiseAttention2d, **arguments)
    x = rand(1, 8, *size)
    h, w = size
    q, k, v = (conv(x)[0] for conv in (module.query, module.key, module.value))
    # (N + 2, D, H, W): q, k and the 4 parts of v
    maps = torch.cat([q[None], k[None], v.unflatten(0, (4, 2))])
    shift = module.shift_weight.mean(0)
    kernel = shift.shape[-1]
    convolution = torch.zeros_like(v)
    for y in range(h):
        for x_ in range(w):
            for dy in range(kernel):
                for dx in range(kernel):
                    i, j = y + dy - kernel // 2, x_ + dx - kernel // 2
                    if not (0 <= i < h and 0 <= j < w):
                        continue
                    for d in range(2):
                        mixed = module.fc_weight @ maps[:, d, i, j]
                        convolution[4 * d:4 * d + 4, y, x_] += (
                            shift[4 * d:4 * d + 4, :, dy, dx] @ mixed)
    attention = literal_attention(module, x[0])
    assert attention.abs().mean() > 0.1 and convolution.abs().mean() > 0.1
    assert_close(module(x)[0],
                 module.alpha * attention + module.beta * convolution)
    beta = module.beta.clone()
    module.beta.zero_()
    assert_close(module(x)[0], module.alpha * attention)
    module.beta.copy_(beta)
    module.alpha.zero_()
    assert_close(module(x)[0], module.beta * convolution)


@BACKBONES
@pytest.mark.parametrize('depth, blocks', [(10, [2, 1, 2, 4, 1]),
                                           (15, [3, 2, 3, 5, 2]),
                                           (19, [3, 3, 4, 6, 3])])
def test_every_depth_has_its_blocks_and_no_spatial_convolution(
        cls, depth, blocks):
    model = small(cls, depth)
    stages = [model.stem.stage, model.layer1, model.layer2, model.layer3,
              model.layer4]
    assert [len(stage.blocks) for stage in stages] == blocks
    assert [stage.blocks[0].attn.attn_kernel_size
            for stage in stages] == [3, 7, 7, 7, 7]
    assert all(type(block.attn) is cls.attn_class for stage in stages
               for block in stage.blocks)
    assert all(m.kernel_size == (1, 1) for m in model.modules()
               if isinstance(m, nn.Conv2d))


@BACKBONES
@torch.no_grad()
def test_network_is_composed_as_in_the_paper(cls):
    model = small(cls)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):  # no norm passes for another
            m.running_var.uniform_(0.5, 1.5)
            nn.init.normal_(m.bias, std=0.1)
    model.eval()
    x = images = torch.randn(2, 3, 50, 33)
    x = model.stem.norm(model.stem.conv(x)).relu()
    outs = []
    for stage in (model.stem.stage, model.layer1, model.layer2, model.layer3,
                  model.layer4):
        x = stage.conv(nn.functional.max_pool2d(x, 2, ceil_mode=True))
        for block in stage.blocks:
            out = block.attn(block.norm1(x).relu())
            x = x + block.conv(block.norm2(out).relu())
        x = stage.norm(x).relu()
        outs.append(x)
    for actual, expected in zip(model(images), outs[1:]):
        assert expected.std() > 0.01
        assert_close(actual, expected)


@BACKBONES
@pytest.mark.parametrize('size', [(64, 96), (33, 50), (5, 9), (1, 1)],
                         ids=str)
def test_maps_of_any_image_are_rounded_up(cls, size):
    model = small(cls, out_indices=(0, 2, 3))
    model.eval()
    outs = model(torch.rand(2, 3, *size))
    assert len(outs) == 3
    for x, channels, stride in zip(outs, (128, 512, 1024), (4, 16, 32)):
        assert x.shape == (2, channels, *(-(-s // stride) for s in size))
        assert x.isfinite().all()


@BACKBONES
@pytest.mark.parametrize('arguments', [
    dict(in_channels=1), dict(attn_kernel_sizes=(3, 3, 3, 5, 5)),
    dict(attn_cfg=dict(share_planes=4)),
    dict(norm_cfg=dict(type='GN', num_groups=1)),
    dict(norm_cfg=dict(type='BN', requires_grad=False)),
], ids=str)
def test_arguments_are_accepted(cls, arguments):
    model = small(cls, **arguments)
    model.init_weights()
    outs = model(torch.rand(2, arguments.get('in_channels', 3), 40, 50))
    assert all(x.isfinite().all() for x in outs)


def test_start_values_survive_init_weights():
    model = small(ACmixSAN)
    model.init_weights()
    layers = [m for m in model.modules()
              if isinstance(m, ACmixPatchwiseAttention2d)]
    assert len(layers) == 10
    eye = torch.eye(9).view(9, 3, 3)
    for m in layers:
        assert torch.equal(m.shift_weight, eye.expand_as(m.shift_weight))
        assert m.alpha.item() == m.beta.item() == 0.5


@BACKBONES
def test_signal_keeps_its_scale_at_the_start(cls):
    model = small(cls, base_channels=64)
    model.init_weights()
    x = torch.randn(2, 3, 96, 96)
    for _ in range(2):  # norms without statistics, then after one step
        model.eval()
        assert all(0.01 < out.std() < 2 for out in model(x))
        model.train()
        assert all(0.5 < out.std() < 0.7 for out in model(x))


def test_neither_path_of_acmix_drowns_the_other_at_the_start():
    attn = small(ACmixSAN, base_channels=64).layer2.blocks[0].attn
    x = torch.randn(2, 512, 16, 16).relu()
    with torch.no_grad():
        mixed = attn(x)
        attn.alpha.zero_()
        convolution = attn(x)
    assert 0.2 < (mixed - convolution).std() / convolution.std() < 5


@BACKBONES
@pytest.mark.parametrize('frozen_stages', [-1, 1])
@pytest.mark.filterwarnings('ignore:frozen_stages')
def test_activation_checkpointing_changes_nothing(cls, frozen_stages):
    kwargs = dict(frozen_stages=frozen_stages)
    plain = small(cls, **kwargs).double()
    saving = small(cls, with_cp=True, **kwargs).double()
    x = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    for model, times in ((plain, 1), (saving, 2)):
        calls = []
        model.layer2.blocks[0].norm1.register_forward_hook(
            lambda *args: calls.append(1))
        model.train()
        sum(out.square().mean() for out in model(x)).backward()
        assert len(calls) == times
    for a, b in zip(plain(x), saving(x)):
        assert_close(a, b)
    for (name, p), q in zip(plain.named_parameters(), saving.parameters()):
        assert (p.grad is None) == (q.grad is None) == (
            not p.requires_grad), name
        if p.grad is not None:
            assert_close(q.grad, p.grad, msg=lambda text: f'{name}: {text}')


@BACKBONES
def test_autocast_to_bfloat16_trains_float32_weights(cls):
    model = small(cls)
    with torch.autocast('cpu', torch.bfloat16):
        outs = model(torch.rand(2, 3, 64, 50))
    sum(out.float().square().mean() for out in outs).backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32, name
        assert p.grad.isfinite().all(), name


@pytest.mark.parametrize('cls', [PatchwiseAttention2d,
                                 ACmixPatchwiseAttention2d])
def test_half_types_agree_with_float64(cls):
    module = layer(cls)
    x = rand(1, 8, 5, 6)
    expected = module(x)
    out = module.bfloat16()(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).norm() < 0.02 * expected.norm()


@BACKBONES
def test_frozen_stages_stay_frozen(cls):
    with pytest.warns(UserWarning, match='frozen_stages=1 .*random'):
        model = small(cls, frozen_stages=1)
    for _ in range(2):
        for part in (model.stem, model.layer1):
            assert not any(p.requires_grad for p in part.parameters())
            assert not any(m.training for m in part.modules())
        for part in (model.layer2, model.layer4):
            assert all(p.requires_grad for p in part.parameters())
            assert all(m.training for m in part.modules())
        before = copy.deepcopy(model.layer1.state_dict())
        model(torch.rand(2, 3, 64, 64))
        for name, value in model.layer1.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert model.train() is model


@BACKBONES
def test_norm_eval_keeps_the_statistics(cls):
    model = small(cls, norm_eval=True)
    model.train()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms and not any(m.training for m in norms)
    assert all(p.requires_grad for p in model.parameters())
    model = small(cls)
    model.train()
    assert all(m.training for m in model.modules())


@pytest.fixture(scope='module', params=['SAN', 'ACmixSAN'])
def detector(request):
    config = get_config('mmdet::retinanet/retinanet_r50_fpn_1x_coco.py').model
    config.backbone = dict(type=request.param, depth=10, base_channels=32)
    config.neck.update(in_channels=[128, 256, 512, 1024], out_channels=32)
    config.bbox_head.update(in_channels=32, feat_channels=32)
    config.test_cfg.score_thr = 0.
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(config)
    model.init_weights()
    return model


def test_one_training_step_reaches_every_parameter(detector):
    detector.train()
    losses = detector.loss(*batch([(64, 64), (50, 33)]))
    total = sum(x if torch.is_tensor(x) else sum(x) for x in losses.values())
    total.backward()
    assert torch.isfinite(total)
    for name, p in detector.backbone.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
    torch.optim.SGD(detector.parameters(), 0.01).step()


def test_detector_predicts_on_odd_sizes(detector):
    detector.eval()
    with torch.no_grad():
        for size in ((47, 61), (35, 90)):
            result = detector.predict(*batch([size]))[0].pred_instances
            assert result.bboxes.isfinite().all() and len(result)


@BACKBONES
def test_state_dict_round_trip(cls):
    model, other = small(cls), small(cls)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    other.load_state_dict(model.state_dict())
    model.eval(), other.eval()
    x = torch.rand(1, 3, 40, 50)
    for a, b in zip(model(x), other(x)):
        assert torch.equal(a, b)


@pytest.fixture
def plain(tmp_path):
    model = small(SAN)
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.running_mean, std=0.1)
            nn.init.uniform_(m.weight, 0.5, 1.5)
    path = tmp_path / 'san.pth'
    torch.save(model.state_dict(), path)
    return model.eval(), str(path)


def test_plain_weights_load_into_unchanged_layers(plain, caplog):
    MMLogger.get_current_instance().addHandler(caplog.handler)
    san, path = plain
    model = small(ACmixSAN,
                  init_cfg=dict(type='Pretrained', checkpoint=path))
    for p in model.parameters():
        nn.init.normal_(p)
    model.init_weights()
    MMLogger.get_current_instance().removeHandler(caplog.handler)
    state = model.state_dict()
    for key, value in san.state_dict().items():
        assert torch.equal(state[key], value), key
    new = [key for key in state if key not in san.state_dict()]
    assert {key.split('.')[-1] for key in new} == {
        'alpha', 'beta', 'fc_weight', 'shift_weight'}
    total = len(state)
    assert f'{total - len(new)} of {total} tensors loaded' in caplog.text
    assert f'; {len(new)} (' in caplog.text


def test_warm_start_computes_what_the_plain_san_computes(plain):
    san, path = plain
    model = small(ACmixSAN, init_cfg=dict(type='WarmStart', checkpoint=path))
    model.init_weights()
    model.eval()
    x = torch.rand(2, 3, 64, 96)
    for a, b in zip(model(x), san(x)):
        assert b.std() > 1e-3
        assert_close(a, b)


def test_warm_start_of_a_plain_san_is_refused(plain):
    model = small(SAN, init_cfg=dict(type='WarmStart', checkpoint=plain[1]))
    with pytest.raises(ValueError, match="init_cfg must be of type "
                       "'Pretrained' .*WarmStart"):
        model.init_weights()


def test_frozen_layers_without_loaded_weights_warn(plain, recwarn):
    cfg = dict(type='Pretrained', checkpoint=plain[1])
    small(SAN, frozen_stages=1, init_cfg=cfg).init_weights()
    model = small(ACmixSAN, frozen_stages=1, init_cfg=cfg)
    assert not [w for w in recwarn if 'frozen_stages' in str(w.message)]
    with pytest.warns(UserWarning, match='frozen_stages=1.*fc_weight'):
        model.init_weights()


@BACKBONES
@pytest.mark.parametrize('arguments, error, message', [
    (dict(depth=50), ValueError, r'depth must be one of \[10, 15, 19\], got '
     '50'),
    (dict(base_channels=24), ValueError,
     'base_channels must be a multiple of 16, got 24'),
    (dict(base_channels=16), ValueError,
     'share_planes must divide out_channels, got share_planes=8, '
     'out_channels=4'),
    (dict(attn_kernel_sizes=7), TypeError,
     'attn_kernel_sizes must be a list or tuple, got 7'),
    (dict(norm_cfg=None), TypeError, 'norm_cfg must be a dict.*got None'),
    (dict(norm_cfg=dict(type='Norm')), ValueError, "norm_cfg must.*'Norm'"),
    (dict(attn_kernel_sizes=(3, 7)), ValueError,
     r'attn_kernel_sizes must .*got \(3, 7\)'),
    (dict(attn_kernel_sizes=(3, 7, 7, 7, 8)), ValueError,
     'each of attn_kernel_sizes must be odd.*got 8'),
    (dict(out_indices=(0, 4)), ValueError,
     r'out_indices must be stages from 0 to 3, got \(0, 4\)'),
    (dict(frozen_stages=5), ValueError,
     'frozen_stages must be from -1 to 4, got 5'),
    (dict(norm_cfg=dict(type='GN', num_groups=32)), ValueError,
     "norm_cfg must fit [0-9]+ channels, as BN .*'GN'"),
    (dict(attn_cfg=dict(num_heads=2)), TypeError, "share_planes.*'num_heads'"),
    (dict(attn_cfg=dict(type='ACmix')), ValueError,
     "attn_cfg must have no 'type'"),
    (dict(attn_cfg=3), TypeError, 'attn_cfg must be a dict or None, got 3'),
    (dict(unknown=1), TypeError, 'unknown'),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else '')
def test_bad_arguments_are_named_with_their_value(cls, arguments, error,
                                                  message):
    with pytest.raises(error, match=message):
        small(cls, **arguments)


@pytest.mark.parametrize('arguments, message', [
    (dict(conv_kernel_size=2), 'conv_kernel_size must be odd, got 2'),
    (dict(num_shift_sets=0), 'num_shift_sets must be positive, got 0'),
])
def test_bad_arguments_of_the_convolution_path(arguments, message):
    with pytest.raises(ValueError, match=message):
        small(ACmixSAN, attn_cfg=arguments)


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match='rel_channels must divide '
                       'out_channels, got rel_channels=3, out_channels=8'):
        ACmixPatchwiseAttention2d(8, 3, 8, 3, BN)
    with pytest.raises(ValueError, match=r'x must have the shape \(B, 8, H, '
                       r'W\), got \(1, 4, 5, 5\)'):
        layer()(rand(1, 4, 5, 5))


@pytest.mark.parametrize('value, weight, name', [
    ((4, 5, 5), (1, 2, 9, 5, 5), 'value'),
    ((1, 4, 5, 5), (1, 3, 9, 5, 5), 'weight'),
    ((1, 4, 5, 5), (1, 2, 8, 5, 5), 'weight'),
    ((1, 4, 5, 5), (1, 2, 4, 5, 5), 'weight'),
    ((1, 4, 5, 5), (1, 2, 9, 5, 4), 'weight'),
    ((2, 4, 5, 5), (1, 2, 9, 5, 5), 'weight'),
    ((1, 4, 5, 5), (1, 2, 5, 5), 'weight'),
])
def test_shapes_that_do_not_fit_are_refused(value, weight, name):
    shape = str(value if name == 'value' else weight)
    with pytest.raises(ValueError, match=f'{name} must .*got') as error:
        patchwise_aggregation(torch.rand(value), torch.rand(weight))
    assert shape in str(error.value)


@BACKBONES
def test_wrong_images_are_named_with_their_shape(cls):
    with pytest.raises(ValueError, match=r'x must have the shape '
                       r'\(B, 3, H, W\), got \(1, 4, 9, 9\)'):
        small(cls)(torch.rand(1, 4, 9, 9))
