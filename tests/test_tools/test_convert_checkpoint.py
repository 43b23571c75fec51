import os
import pickle
import runpy
import sys
from pathlib import Path

import pytest
import torch

from acmix_det.models import ACmixResNet
from tests.test_checkpoints import released_resnet

TOOL = Path(__file__).parents[2] / 'tools' / 'convert_checkpoint.py'

CONFIG = """
default_scope = 'mmdet'
model = dict(
    type='RetinaNet',
    backbone=dict(type='ACmixResNet', depth=26, base_channels={channels}),
    neck=dict(type='FPN', in_channels=[64, 128, 256, 512], out_channels=16,
              num_outs=5),
    bbox_head=dict(type='RetinaHead', num_classes=2, in_channels=16,
                   feat_channels=16))
"""


def convert(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, 'argv', [TOOL.name, *map(str, args)])
    code = 0
    try:
        runpy.run_path(str(TOOL), run_name='__main__')
    except SystemExit as error:
        code = error.code
    return code, capsys.readouterr()


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(1)
    model = ACmixResNet(26, base_channels=16)
    for parameter in model.parameters():
        parameter.data.normal_()
    path = tmp_path / 'released.pth'
    torch.save(dict(state_dict=released_resnet(model), epoch=3), path)
    return model, path


def test_converted_file_loads_by_init_cfg(source, tmp_path, monkeypatch,
                                          capsys):
    model, path = source
    config = tmp_path / 'config.py'
    config.write_text(CONFIG.format(channels=16))
    target = tmp_path / 'new' / 'ours.pth'
    code, out = convert(monkeypatch, capsys, path, target, '--config', config)
    assert code == 0 and f'fit the backbone of {config}' in out.out
    other = ACmixResNet(26, base_channels=16, init_cfg=dict(
        type='Pretrained', checkpoint=str(target)))
    other.init_weights()
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key


def test_config_of_another_width_is_refused(source, tmp_path, monkeypatch,
                                            capsys):
    config = tmp_path / 'config.py'
    config.write_text(CONFIG.format(channels=32))
    target = tmp_path / 'ours.pth'
    code, _ = convert(monkeypatch, capsys, source[1], target, '--config',
                      config)
    assert 'shape of conv1.weight: (64, 3, 7, 7)' in code or 'shape of' in code
    assert not target.exists()


def test_safetensors_are_read(source, tmp_path, monkeypatch, capsys):
    safetensors = pytest.importorskip('safetensors.torch')
    path = tmp_path / 'released.safetensors'
    safetensors.save_file(released_resnet(source[0]), path)
    target = tmp_path / 'ours.pth'
    assert convert(monkeypatch, capsys, path, target)[0] == 0
    state = torch.load(target, weights_only=True)['state_dict']
    assert state.keys() == source[0].state_dict().keys()
    path.write_bytes(b'no')
    code, _ = convert(monkeypatch, capsys, path, target, '--force')
    assert 'source must be a safetensors file' in code


def test_missing_safetensors_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'safetensors', None)
    path = tmp_path / 'x.safetensors'
    path.touch()
    code, _ = convert(monkeypatch, capsys, path, tmp_path / 'y.pth')
    assert 'pip install safetensors' in code


class Evil:

    def __reduce__(self):
        return os.mkdir, ('evil', )


def test_pickled_code_is_not_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with open('evil.pth', 'wb') as file:
        pickle.dump(Evil(), file)
    code, _ = convert(monkeypatch, capsys, 'evil.pth', 'ours.pth')
    assert 'source must hold tensors and plain types only' in code
    torch.save(Evil(), 'evil.pth')
    code, _ = convert(monkeypatch, capsys, 'evil.pth', 'ours.pth')
    assert 'source must hold tensors and plain types only' in code
    assert not os.path.exists('evil') and not os.path.exists('ours.pth')


@pytest.mark.parametrize('content', [b'', b'not a checkpoint'])
def test_broken_files_are_named(content, tmp_path, monkeypatch, capsys):
    path = tmp_path / 'broken.pth'
    path.write_bytes(content)
    code, _ = convert(monkeypatch, capsys, path, tmp_path / 'ours.pth')
    assert 'source must' in code and str(path) in code


def test_bad_arguments_are_named(source, tmp_path, monkeypatch, capsys):
    path = source[1]
    for args, message in (
        (('no.pth', 'x.pth'), 'source must be a file, got no.pth'),
        ((path, 'x.bin'), 'target must end with .pth, got x.bin'),
        ((path, path), f'target must not exist (or use --force), got {path}'),
        ((path, 'x.pth', '--config', 'no.py'),
         '--config must be a file, got no.py'),
    ):
        code, out = convert(monkeypatch, capsys, *args)
        assert code == 2 and message in out.err


def test_unknown_keys_are_named(tmp_path, monkeypatch, capsys, source):
    state = released_resnet(source[0])
    state['layer9.weight'] = torch.zeros(1)
    path = tmp_path / 'other.pth'
    torch.save(state, path)
    code, _ = convert(monkeypatch, capsys, path, tmp_path / 'ours.pth')
    assert 'layer9.weight' in code
