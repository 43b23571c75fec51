"""tools/visualize_attention.py."""
import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from mmengine.config import Config

from acmix_det.evaluation import (attention_maps, attention_plots,
                                  build_detector)

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / 'configs' / 'digits'
CONV = str(DIGITS / 'retinanet_r18_fpn_digits.py')
NECK = str(DIGITS / 'retinanet_r18_fpn-acmix_digits.py')
ACMIX = str(DIGITS / 'retinanet_r18-acmix_fpn_digits.py')
BOTH = str(DIGITS / 'retinanet_r18-acmix_fpn-acmix_digits.py')
SASA = str(DIGITS / 'retinanet_r18-sasa_fpn_digits.py')


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    cv2.imwrite('image.png', np.full((64, 96, 3), 90, np.uint8))

    def start(*args):
        """Exit status or message, and the output."""
        monkeypatch.setattr(sys, 'argv', ['visualize_attention.py', *args])
        code = 0
        try:
            runpy.run_path(str(ROOT / 'tools' / 'visualize_attention.py'),
                           run_name='__main__')
        except SystemExit as error:
            code = error.code
        return code, capsys.readouterr()

    return start


@pytest.fixture
def views(monkeypatch):
    seen = []
    draw = attention_plots.draw_attention

    def keep(view):
        seen.append(view)
        return draw(view)

    monkeypatch.setattr(attention_plots, 'draw_attention', keep)
    return seen


def test_list_names_the_attention_layers_with_their_options(run):
    code, out = run(NECK, '--list')
    assert code == 0
    names = [line.split()[0] for line in out.out.splitlines()]
    assert names == [f'neck.fpn_convs.{i}.conv' for i in range(3)]
    assert 'ACmix2d(64, 64, ' in out.out and 'num_heads=8' in out.out
    assert 'No checkpoint was given: the weights are random.' in out.err


@pytest.mark.parametrize('config, layer', [
    (BOTH, 'backbone.layer4.1.conv2'), (NECK, 'neck.fpn_convs.2.conv')],
    ids=['backbone', 'neck'])
def test_default_layer_is_the_last_of_the_backbone_or_of_all(
        config, layer, run, views):
    code, out = run(config, '--image', 'image.png', '--position', '70', '20')
    assert code == 0 and 'Wrote attention.png' in out.out
    assert views[0].name == layer and views[0].position == (70, 20)
    assert cv2.imread('attention.png').shape[0] > 500


def test_layer_and_output_are_as_told(run, views):
    code, _ = run(SASA, '--image', 'image.png', '--position', '0', '63',
                  '--layer', 'backbone.layer3.0.conv2', '--out', 'a/b.png')
    assert code == 0 and views[0].name == 'backbone.layer3.0.conv2'
    assert Path('a/b.png').is_file()


def test_checkpoint_is_loaded_or_refused_as_a_whole(run):
    model = build_detector(Config.fromfile(ACMIX))
    name, layer = list(attention_maps.attention_layers(model).items())[1]
    with torch.no_grad():
        layer.alpha.fill_(0.75)
    torch.save(dict(state_dict=model.state_dict()), 'weights.pth')
    code, out = run(ACMIX, 'weights.pth', '--mixing', '--out', 'mix.png')
    assert code == 0 and Path('mix.png').is_file()
    row = next(x for x in out.out.splitlines() if x.startswith(name))
    assert row.split()[1:] == ['0.7500', '0.5000', '0.4055']
    assert 'random' not in out.err
    code, _ = run(SASA, 'weights.pth', '--list')
    assert 'checkpoint must hold the weights of the config, got ' \
        'weights.pth' in code
    assert 'unexpected key' in code and len(code) < 1000


@pytest.mark.parametrize('point', [(69.6, 20.4), None], ids=['click', 'close'])
def test_click_gives_the_position(point, run, views, monkeypatch):
    pyplot.switch_backend('Agg')
    monkeypatch.setattr(FigureCanvasAgg, 'required_interactive_framework',
                        'window')
    monkeypatch.setattr(pyplot, 'ginput',
                        lambda *args, **kwargs: [point] if point else [])
    code, _ = run(ACMIX, '--image', 'image.png', '--click')
    if point:
        assert code == 0 and views[0].position == (70, 20)
    else:
        assert '--click must get a position, got a closed window' in code


def test_click_needs_a_display(run, monkeypatch):
    pyplot.switch_backend('Agg')
    code, _ = run(ACMIX, '--image', 'image.png', '--click')
    assert '--click must have a display' in code
    assert 'use --position X Y' in code

    def no_toolkit():
        raise ImportError('no toolkit')

    monkeypatch.setattr(pyplot, 'subplots', no_toolkit)
    code, _ = run(ACMIX, '--image', 'image.png', '--click')
    assert '--click must have a display' in code and 'no toolkit' in code


AT = ('--image', 'image.png', '--position', '1', '1')


@pytest.mark.parametrize('args, message', [
    ((ACMIX, ), 'one of the arguments --position --click --list --mixing'),
    ((ACMIX, '--position', '1', '1'), '--image must be given'),
    (('no.py', '--list'), 'config must be a file, got no.py'),
    ((ACMIX, 'no.pth', '--list'), 'checkpoint must be a file, got no.pth'),
    ((ACMIX, '--image', 'no.png', '--click'),
     'image must be a file, got no.png'),
    ((ACMIX, '--image', 'image.png', '--position', '96', '0'),
     'position must be 0 to 95 (x) and 0 to 63 (y), got 96 0'),
    ((ACMIX, *AT, '--layer', 'neck'), "backbone.layer4.1.conv2, got 'neck'"),
    ((ACMIX, *AT, '--level', '1'), 'level must be below 1'),
    ((CONV, *AT), 'config must have attention layers, got'),
    ((CONV, '--mixing'), 'model must have an ACmix layer, got RetinaNet'),
    ((SASA, '--mixing'), 'model must have an ACmix layer, got RetinaNet'),
])
def test_bad_arguments_end_with_a_message(args, message, run):
    code, out = run(*args)
    assert message in (out.err if code == 2 else code)
    assert not Path('attention.png').exists()
