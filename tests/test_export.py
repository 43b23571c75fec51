"""ONNX, torch.export and torch.compile; one graph serves every size."""
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from torch import nn

from acmix_det.evaluation import build_detector
from acmix_det.layers import ACmix2d, SASAStem2d, StandAloneSelfAttention2d
from acmix_det.ops import local_attention
from acmix_det.ops.reference import local_attention as reference

onnx = pytest.importorskip('onnx')
onnxruntime = pytest.importorskip('onnxruntime')

DIGITS = Path(__file__).parents[1] / 'configs' / 'digits'
SIZES = [(2, 16, 16), (1, 20, 28), (1, 5, 3), (3, 2, 9), (1, 1, 1)]
# torch.export takes a dimension of 1, also of the output, for a constant
LARGER = [(2, 16, 16), (1, 20, 28), (2, 5, 9)]
LAYERS = {
    'sasa': lambda: StandAloneSelfAttention2d(8, 8, 3, padding=1, num_heads=4),
    'sasa with stride': lambda: StandAloneSelfAttention2d(
        8, 8, 3, stride=2, padding=1, attn_kernel_size=3),
    'absolute': lambda: StandAloneSelfAttention2d(
        8, 8, 3, padding=1, attn_kernel_size=3, position='absolute'),
    'zeros, no key': lambda: StandAloneSelfAttention2d(
        8, 8, 3, padding=1, attn_kernel_size=3, use_key=False,
        padding_mode='zeros'),
    'acmix': lambda: ACmix2d(8, 8, 3, padding=1),
    'acmix with stride and dilation': lambda: ACmix2d(
        8, 8, 3, stride=2, padding=2, dilation=2, num_heads=8,
        attn_kernel_size=3),
    'stem': lambda: SASAStem2d(8, 8),
}


def export(model, x, path, **kwargs):
    torch.onnx.export(
        model, (x, ), path, dynamo=False, input_names=['x'],
        opset_version=17, dynamic_axes=dict(x={0: 'b', 2: 'h', 3: 'w'}),
        **kwargs)
    check_nodes(path)
    return onnxruntime.InferenceSession(path)


def check_nodes(path):
    nodes = onnx.load(path).graph.node
    assert {node.domain for node in nodes} <= {'', 'ai.onnx'}
    assert 'Col2Im' not in {node.op_type for node in nodes}


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', LAYERS)
def test_onnx_runs_at_other_sizes_than_that_of_the_export(name, tmp_path):
    layer = LAYERS[name]().eval()
    session = export(layer, torch.rand(2, 8, 16, 16), tmp_path / 'x.onnx')
    for b, h, w in SIZES:
        x = torch.rand(b, 8, h, w)
        actual, = session.run(None, dict(x=x.numpy()))
        torch.testing.assert_close(torch.from_numpy(actual), layer(x).detach(),
                                   rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('head_dim', [1, 2])
def test_no_exported_product_is_empty(head_dim, tmp_path):
    # heads of one channel have positions along the width alone
    layer = StandAloneSelfAttention2d(4, 4, 3, padding=1,
                                      num_heads=4 // head_dim).eval()
    export(layer, torch.rand(1, 4, 8, 8), tmp_path / 'x.onnx')
    nodes = onnx.load(tmp_path / 'x.onnx').graph.node
    assert sum(node.op_type == 'Einsum' for node in nodes) == head_dim


class Maps(nn.Module):
    """Class and box maps of a detector."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, x):
        scores, boxes = self.detector(x, mode='tensor')
        return (*scores, *boxes)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', [
    'retinanet-sasa_r18-sasa_fpn-sasa_digits',
    'retinanet_r18-acmix_fpn-acmix_digits'])
def test_detector_runs_in_onnx_at_other_sizes(name, tmp_path):
    model = build_detector(Config.fromfile(DIGITS / f'{name}.py'))
    model = Maps(model).eval()
    session = export(model, torch.rand(2, 3, 64, 64), tmp_path / 'x.onnx')
    for shape in ((1, 3, 96, 64), (3, 3, 50, 77)):
        x = torch.rand(shape)
        with torch.no_grad():
            expected = model(x)
        for actual, y in zip(session.run(None, dict(x=x.numpy())), expected):
            torch.testing.assert_close(torch.from_numpy(actual), y, rtol=1e-3,
                                       atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', ['sasa with stride',
                                  'acmix with stride and dilation'])
def test_exporter_of_torch_export_keeps_sizes_dynamic_too(name, tmp_path):
    pytest.importorskip('onnxscript')
    layer, path = LAYERS[name]().eval(), tmp_path / 'x.onnx'
    size = torch.export.Dim.DYNAMIC
    torch.onnx.export(layer, (torch.rand(2, 8, 16, 16), ), path, dynamo=True,
                      dynamic_shapes=({0: size, 2: size, 3: size}, ),
                      verbose=False)
    check_nodes(path)
    session = onnxruntime.InferenceSession(path)
    for b, h, w in LARGER:
        x = torch.rand(b, 8, h, w)
        actual, = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(actual), layer(x).detach(),
                                   rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', LAYERS)
def test_exported_program_holds_standard_operators_only(name):
    layer = LAYERS[name]().eval()
    size = torch.export.Dim.DYNAMIC
    program = torch.export.export(  # strict is the default of torch 2.6
        layer, (torch.rand(2, 8, 18, 14), ), strict=False,
        dynamic_shapes=({0: size, 2: size, 3: size}, ))
    namespaces = {
        node.target.namespace for node in program.graph.nodes
        if hasattr(node.target, 'namespace')
    }
    assert namespaces == {'aten'}
    # the stem keeps whether the image fills its blocks
    for b, h, w in LARGER if name != 'stem' else [(1, 21, 30), (2, 5, 9)]:
        x = torch.rand(b, 8, h, w)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4,
                                   atol=1e-5)


@pytest.mark.parametrize('padding_mode', ['mask', 'zeros', 'reflect'])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float16])
@pytest.mark.parametrize('h, w, k, stride, dilation', [
    (5, 7, 3, 1, 1), (2, 9, 5, 2, 3), (1, 1, 7, 1, 1), (6, 4, 1, 3, 2)])
def test_exported_form_matches_reference(padding_mode, dtype, h, w, k, stride,
                                         dilation, monkeypatch):
    monkeypatch.setattr('acmix_det.ops.export.is_exporting', lambda: True)
    q, key, value = torch.randn(3, 2, 3, 5, h, w, dtype=dtype)
    rel_pos = (torch.randn(3, 2, k, dtype=dtype),
               torch.randn(3, 3, k, dtype=dtype))
    args = (k, 0.7, stride, dilation, padding_mode)
    for with_key, with_rel_pos in ((1, 1), (1, 0), (0, 1)):
        tensors = (q, key if with_key else None, value,
                   *(rel_pos if with_rel_pos else (None, None)))
        actual = local_attention(
            *tensors[:3], k, rel_pos_h=tensors[3], rel_pos_w=tensors[4],
            scale=0.7, stride=stride, dilation=dilation,
            padding_mode=padding_mode)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, reference(*tensors, *args))


@pytest.mark.parametrize('name', LAYERS)
def test_layers_compile_to_one_graph(name):
    layer = LAYERS[name]()
    torch._dynamo.reset()  # the layers share their forward
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
    for shape in ((2, 8, 16, 16), (1, 8, 5, 3)):
        x = torch.rand(shape, requires_grad=True)
        out = compiled(x)
        torch.testing.assert_close(out, layer(x))
        out.sum().backward()
        assert torch.isfinite(x.grad).all()
