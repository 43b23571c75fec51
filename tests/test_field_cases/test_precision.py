"""Field cases of number types, determinism and memory.

What each id is about stands in docs/field_cases.md.
"""
import ast
import copy
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import acmix_det
from acmix_det.layers import ACmix2d, SASAStem2d, StandAloneSelfAttention2d
from acmix_det.layers import acmix as acmix_module
from acmix_det.layers import sasa as sasa_module
from acmix_det.models import ACmixResNet, SASAFPN, SASAResNet
from acmix_det.ops import local_attention
from acmix_det.ops.local_attention import MODULES

LAYER_MODULES = {
    StandAloneSelfAttention2d: sasa_module,
    ACmix2d: acmix_module
}
both_layers = pytest.mark.parametrize('cls', LAYER_MODULES)
devices = pytest.mark.parametrize(
    'device', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
HALF_TYPES = (torch.float16, torch.bfloat16)


def build(cls, channels=32, **kwargs):
    torch.manual_seed(0)
    return cls(channels, channels, 3, padding=1,
               **{'num_heads': 4, **kwargs})


@devices
@both_layers
@pytest.mark.parametrize('dtype', HALF_TYPES, ids=str)
@pytest.mark.parametrize('padding_mode', ['mask', 'zeros', 'reflect'])
def test_f39_half_types_run_forward_and_backward(cls, padding_mode, dtype,
                                                 device):
    layer = build(cls, padding_mode=padding_mode)
    x = torch.randn(1, 32, 8, 8)
    expected = copy.deepcopy(layer).double()(x.double())
    layer, x = layer.to(device, dtype), x.to(device, dtype).requires_grad_()
    out = layer(x)
    assert out.dtype == dtype
    assert_close(out.double().cpu(), expected, rtol=.05, atol=.05)
    out.float().square().mean().backward()
    for name, grad in (('x', x.grad),
                       *((n, p.grad) for n, p in layer.named_parameters())):
        assert grad.dtype == dtype and grad.isfinite().all(), name


@devices
@pytest.mark.parametrize('backend', MODULES)
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, *HALF_TYPES],
                         ids=str)
def test_f39_can_use_tells_the_truth(backend, dtype, device):
    q = torch.randn(1, 2, 16, 6, 5, device=device, dtype=dtype)
    reason = MODULES[backend].can_use(q)
    if reason is None:
        out = local_attention(q, q, q, 3, backend=backend)
        assert out.dtype == dtype and out.isfinite().all()
    else:
        with pytest.raises(RuntimeError) as caught:
            local_attention(q, q, q, 3, backend=backend)
        assert f'backend={backend!r} cannot run: {reason}' in str(
            caught.value)


@pytest.mark.parametrize('backend', ['auto', *MODULES])
def test_f39_type_without_arithmetic_is_named(backend):
    q = torch.zeros(1, 2, 16, 6, 5).to(torch.float8_e4m3fn)
    with pytest.raises((RuntimeError, TypeError, ValueError),
                       match='(?i)float8_e4m3fn'):
        local_attention(q, q, q, 3, backend=backend)


@devices
@both_layers
@pytest.mark.parametrize('dtype', HALF_TYPES, ids=str)
def test_f40_autocast_gives_one_type_inside_and_float32_gradients(
        cls, dtype, device, monkeypatch):
    seen = []

    def spy(query, key, value, *args, rel_pos_h=None, rel_pos_w=None,
            **kwargs):
        given = (query, key, value, rel_pos_h, rel_pos_w)
        seen.append({x.dtype for x in given if x is not None})
        return local_attention(query, key, value, *args, rel_pos_h=rel_pos_h,
                               rel_pos_w=rel_pos_w, **kwargs)

    monkeypatch.setattr(LAYER_MODULES[cls], 'local_attention', spy)
    layer = build(cls).to(device)
    x = torch.randn(2, 32, 7, 5, device=device)
    expected = layer(x)
    seen.clear()
    with torch.autocast(device, dtype):
        out = layer(x)
    assert seen == [{dtype}] and out.dtype == dtype
    assert_close(out.float(), expected, rtol=.1, atol=.1)
    out.float().square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad.dtype == torch.float32, name
        assert p.grad.isfinite().all(), name


@devices
@pytest.mark.parametrize('dtype', HALF_TYPES, ids=str)
def test_f40_autocast_reaches_backbone_stem_and_neck(dtype, device):
    backbone = SASAResNet(26, base_channels=16, attn_stem={}, norm_eval=False)
    neck = SASAFPN([64, 128, 256, 512], 32, 5).to(device)
    backbone.to(device)
    with torch.autocast(device, dtype):
        outs = neck(backbone(torch.rand(2, 3, 64, 64, device=device)))
    assert all(x.dtype == dtype for x in outs)
    sum(x.float().square().mean() for x in outs).backward()
    for model in (backbone, neck):
        for name, p in model.named_parameters():
            assert p.grad.dtype == torch.float32, name
            assert p.grad.isfinite().all(), name


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@devices
@pytest.mark.parametrize('make', [
    lambda: build(ACmix2d), lambda: build(ACmix2d, stride=2),
    lambda: build(StandAloneSelfAttention2d, stride=2),
    lambda: build(StandAloneSelfAttention2d, padding_mode='reflect'),
    lambda: build(ACmix2d, backend='torch'),
    lambda: build(ACmix2d, backend='reference'),
    lambda: SASAStem2d(32, 32),
], ids=['acmix', 'acmix-stride', 'sasa-stride', 'sasa-reflect', 'torch',
        'reference', 'stem'])
def test_f42_deterministic_algorithms_repeat_bit_for_bit(
        make, device, deterministic, recwarn):
    layer = make().to(device)
    x = torch.randn(1, 32, 9, 9, device=device, requires_grad=True)
    runs = []
    for _ in range(2):
        out = layer(x)
        grads = torch.autograd.grad(out.square().sum(),
                                    (x, *layer.parameters()))
        runs.append((out, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    assert not [str(w.message) for w in recwarn
                if 'determinis' in str(w.message)]


@pytest.mark.parametrize('frozen', [dict(), dict(
    frozen_stages=1, stage_with_attn=(False, True, True, True))],
    ids=['trained', 'frozen'])
def test_f70_checkpointing_changes_no_output_and_no_gradient(frozen):
    torch.manual_seed(0)
    plain = ACmixResNet(26, norm_eval=False, **frozen).double()
    saving = ACmixResNet(26, norm_eval=False, with_cp=True, **frozen).double()
    saving.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    for a, b in zip(plain(x), saving(x)):
        assert_close(b, a)
    for model in (plain, saving):
        sum(out.square().mean() for out in model(x)).backward()
    for (name, p), q in zip(plain.named_parameters(), saving.parameters()):
        assert (p.grad is None) == (q.grad is None) == (
            not p.requires_grad), name
        if p.grad is not None:
            assert_close(q.grad, p.grad, msg=lambda text: f'{name}: {text}')


def test_f70_own_checkpointing_is_not_reentrant():
    calls = []
    for path in Path(acmix_det.__file__).parent.rglob('*.py'):
        if '.mim' in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text('utf-8'))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                    'checkpoint', 'cp.checkpoint',
                    'torch.utils.checkpoint.checkpoint'):
                options = {k.arg: ast.unparse(k.value) for k in node.keywords}
                calls.append(options.get('use_reentrant'))
    assert set(calls) <= {'False'}
