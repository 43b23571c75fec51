"""Field cases of export and of counted operations.

What each id is about stands in docs/field_cases.md.
"""
import importlib.util
import json
import runpy
import socket
import subprocess
import sys

import pytest
import torch
from mmengine.analysis import FlopAnalyzer
from mmengine.config import Config
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from acmix_det.evaluation import count_complexity
from acmix_det.layers import ACmix2d, SASAStem2d, StandAloneSelfAttention2d
from acmix_det.models import (ACmixPyramidVisionTransformer, ACmixResNet,
                              ACmixSwinTransformer, SASAResNet)
from acmix_det.ops import cpu_backend, flop_convention
from tests.test_configs import CONFIGS, ROOT, load, meta_detector

TOOL = ROOT.parent / 'tools' / 'get_complexity.py'


# --- export


def export(layer, path, opset_version=17):
    torch.onnx.export(
        layer.eval(), (torch.rand(1, 8, 16, 16), ), path, dynamo=False,
        opset_version=opset_version, input_names=['x'],
        dynamic_axes=dict(x={0: 'b', 2: 'h', 3: 'w'}))


def assert_onnx_equals_torch(layer, path, sizes):
    session = pytest.importorskip('onnxruntime').InferenceSession(path)
    for size in sizes:
        x = torch.rand(1, 8, *size)
        actual, = session.run(None, dict(x=x.numpy()))
        torch.testing.assert_close(torch.from_numpy(actual), layer(x).detach(),
                                   rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('backend', ['auto', 'torch', 'cpu'])
def test_f44_export_takes_an_exportable_path_by_itself(backend, tmp_path):
    pytest.importorskip('onnx')
    if cpu_backend.can_use(torch.empty(0)) is not None and backend == 'cpu':
        pytest.skip('the native backend has not been built')
    layer = StandAloneSelfAttention2d(8, 8, 3, padding=1, backend=backend)
    path = tmp_path / 'x.onnx'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_backend, 'local_attention', None)  # not callable
        export(layer, path)
    assert_onnx_equals_torch(layer, path, [(16, 16)])


@pytest.mark.filterwarnings('ignore')
def test_f45_height_and_width_stay_dynamic(tmp_path):
    pytest.importorskip('onnx')
    layer = ACmix2d(8, 8, 3, padding=1)
    export(layer, tmp_path / 'x.onnx')
    assert_onnx_equals_torch(layer, tmp_path / 'x.onnx',
                             [(16, 16), (20, 28), (5, 3)])


LAYERS = {
    'sasa': lambda: StandAloneSelfAttention2d(8, 8, 3, padding=1),
    'acmix': lambda: ACmix2d(8, 8, 3, padding=1),
    'stem': lambda: SASAStem2d(8, 8)
}


@pytest.mark.parametrize('name', LAYERS)
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('opset_version', [13, 17])
def test_f46_graph_holds_standard_operators_from_the_minimum_opset(
        name, opset_version, tmp_path):
    onnx = pytest.importorskip('onnx')
    layer, path = LAYERS[name](), tmp_path / 'x.onnx'
    export(layer, path, opset_version)
    model = onnx.load(path)
    nodes = model.graph.node
    assert len(nodes) > 5 and not model.functions
    assert {node.domain for node in nodes} <= {'', 'ai.onnx'}
    assert 'Col2Im' not in {node.op_type for node in nodes}
    assert_onnx_equals_torch(layer, path, [(5, 9)])


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', ['sasa', 'acmix'])
def test_f46_opset_below_the_minimum_is_refused_early(name, tmp_path):
    pytest.importorskip('onnx')
    with pytest.raises(ValueError,
                       match='opset_version must be .*13.*got 12'):
        export(LAYERS[name](), tmp_path / 'x.onnx', 12)


OTHER_PROCESS = """
import sys
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
cfg = Config.fromfile(sys.argv[1])
init_default_scope('mmdet')
model = MODELS.build(cfg.model)
print(type(model.backbone).__name__, type(model.neck).__name__)
"""


@pytest.mark.parametrize('kind, dumped', [('SASA', True), ('ACmix', False)])
def test_f47_custom_imports_are_enough_in_another_process(kind, dumped,
                                                          tmp_path):
    lower = kind.lower()
    config = ROOT / f'digits/retinanet_r18-{lower}_fpn-{lower}_digits.py'
    if dumped:  # as mmengine writes it beside a checkpoint
        Config.fromfile(config).dump(tmp_path / 'config.py')
        config = tmp_path / 'config.py'
    elif not importlib.util.find_spec('pkg_resources'):
        pytest.skip("mmengine alone reads 'mmdet::' with setuptools < 82 only")
    done = subprocess.run([sys.executable, '-c', OTHER_PROCESS, config],
                          cwd=ROOT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == [f'{kind}ResNet', f'{kind}FPN']


# --- flops


class OnImage(nn.Module):
    """A layer of 16 channels behind an image, which costs nothing."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[:, :1].expand(-1, 16, -1, -1))


def sasa(backend='auto', **kwargs):
    return StandAloneSelfAttention2d(
        16, 16, 3, padding=1, num_heads=4, attn_kernel_size=7, bias=False,
        backend=backend, **kwargs)


def counted(layer, size=10, convention='executed'):
    x = torch.rand(1, 16, size, size)
    with torch.no_grad(), flop_convention(convention), FlopCounterMode(
            display=False) as counter:
        layer(x)
    return counter.get_total_flops()


@pytest.mark.parametrize('backend', ['auto', 'torch', 'reference'])
def test_f49_paper_convention_counts_all_three_products(backend):
    macs = 76_800 + 3 * 78_400
    assert counted(sasa(backend), convention='paper') == 2 * macs
    cost = count_complexity(OnImage(sasa(backend)), (10, 10), 'paper')
    assert cost.macs == macs and cost.flops == 2 * macs


@pytest.mark.parametrize('backend', ['auto', 'torch'])
def test_f49_executed_convention_counts_the_separable_form(backend):
    macs = 76_800 + 2 * 78_400 + 100 * 16 * 7
    assert counted(sasa(backend)) == 2 * macs
    assert count_complexity(OnImage(sasa(backend)), (10, 10)).macs == macs


@pytest.fixture
def complexity(monkeypatch, capsys):
    def run(*args):
        monkeypatch.setattr(sys, 'argv', [TOOL.name, *map(str, args)])
        runpy.run_path(str(TOOL), run_name='__main__')
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize('kind', ['sasa', 'acmix'])
def test_f51_size_is_one_number_or_two_and_both_units_are_shown(complexity,
                                                                kind):
    config = ROOT / f'digits/retinanet_r18-{kind}_fpn-{kind}_digits.py'
    for shape, shown in (((64, 96), '64 x 96'), ((64, ), '64 x 64')):
        assert f'One image of {shown};' in complexity(
            config, '--total', '--shape', *shape)
    row, = json.loads(complexity(config, '--total', '--shape', 640, 960,
                                 '--format', 'json'))
    macs, flops = row['MACs (G)'], row['FLOPs (G)']
    assert macs > 1 and flops == pytest.approx(2 * macs, abs=2e-3)


def test_f52_all_counters_agree_with_every_backend():
    projections = 2 * 76_800
    totals = {counted(sasa(backend)) for backend in ('auto', 'torch')}
    if cpu_backend.can_use(torch.empty(0)) is None:
        totals.add(counted(sasa('cpu')))
    total, = totals
    assert total > projections
    assert total == count_complexity(OnImage(sasa()), (10, 10)).flops
    layer = sasa()
    macs = FlopAnalyzer(layer, torch.rand(1, 16, 10, 10)).total()
    assert total == 2 * macs


def test_f52_backward_is_counted_too():
    layer, x = sasa(), torch.rand(1, 16, 10, 10)
    forward = counted(layer)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() > 2 * forward


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError('the network was touched')

    for name in ('connect', 'connect_ex'):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, 'getaddrinfo', refuse)


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore')
def test_f53_every_shipped_config_is_counted_without_network(no_network):
    counted_types = set()
    for name in CONFIGS:
        cfg = load(name).model
        model = meta_detector(load(name))
        types = cfg.type, cfg.backbone.type, cfg.neck.type, cfg.get(
            'bbox_head', {}).get('type')
        if types not in counted_types:
            counted_types.add(types)
            cost = count_complexity(model, (64, 64))
            assert cost.macs > 0 and cost.parts['neck'].macs > 0, name
    assert len(counted_types) > 10


@pytest.mark.filterwarnings('ignore')
def test_f53_tool_needs_no_network_where_weights_are_named(complexity,
                                                           no_network):
    name = 'sasa/retinanet_r50-sasa-pretrained_fpn-sasa_1x_coco'
    assert load(name).model.backbone.init_cfg.checkpoint
    row, = json.loads(complexity(ROOT / f'{name}.py', '--total', '--shape',
                                 64, '--format', 'json'))
    assert row['params (M)'] > 10


@pytest.mark.parametrize('make', [
    lambda **kw: SASAResNet(50, **kw), lambda **kw: ACmixResNet(26, **kw),
    lambda **kw: ACmixSwinTransformer(depths=(1, 1, 1, 1), **kw),
    lambda **kw: ACmixPyramidVisionTransformer(num_layers=[1, 1, 1, 1], **kw),
], ids=['sasa', 'acmix', 'swin', 'pvt'])
def test_f53_pretrained_is_refused_for_init_cfg(make, no_network):
    with pytest.raises((TypeError, ValueError), match='init_cfg'):
        make(pretrained='x')
