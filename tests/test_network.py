"""Nothing reaches for the network unless a user names what to fetch.

The tools run where tests/no_network/sitecustomize.py refuses every connection
and every lookup. tests/test_tools/test_demo.py runs the demo there too.
"""
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmdet.models.backbones import ResNet
from mmengine.runner import CheckpointLoader

from acmix_det.compat.faults import FaultError
from acmix_det.models import ACmixResNet
from tests.test_checkpoints import released_resnet

ROOT = Path(__file__).parents[1]
HOOK = Path(__file__).with_name('no_network')
DIGITS = ROOT / 'configs/digits/retinanet_r18-acmix_fpn_digits.py'
PRETRAINED = dict(backbone=dict(init_cfg=dict(
    _delete_=True, type='Pretrained', checkpoint='torchvision://resnet18')))
# one of each family; the first six name weights to download
FAMILIES = [
    'sasa/retinanet_r50-sasa-pretrained_fpn-sasa_1x_coco',
    'acmix/retinanet_r50-acmix-pretrained_fpn-acmix_1x_coco',
    'acmix/retinanet_swin-t-acmix_fpn_1x_coco',
    'acmix/retinanet_pvt-t-acmix_fpn_1x_coco',
    'acmix/mask-rcnn_swin-t-acmix_fpn_1x_coco',
    'sasa/retinanet_r50_fpn-sasa_1x_coco',
    'acmix/retinanet_san10-acmix_fpn_1x_coco',
    'sasa/retinanet_r50-sasa-stem_fpn_8xb8-640-150e_coco',
    'digits/retinanet-sasa_r18-sasa_fpn-sasa_digits',
]


def environment(folder):
    """Of a process that cannot leave this machine, nor use a proxy on it."""
    kept = {key: x for key, x in os.environ.items()
            if not key.lower().endswith('_proxy')}
    return dict(kept, OMP_NUM_THREADS='1', TORCH_HOME=str(folder / 'torch'),
                NETWORK_ATTEMPTS=str(folder / 'attempts'),
                PYTHONPATH=os.pathsep.join(map(str, (HOOK, ROOT))))


def write_config(folder, name, model):
    """The digits of `folder` and one epoch."""
    data = dict(data_root=f'{folder}/digits/')
    file = dict(ann_file=f'{folder}/digits/annotations/val.json')
    path = folder / name
    path.write_text(
        f'_base_ = {str(DIGITS)!r}\n'
        f'model = {model}\n'
        f'train_dataloader = dict(batch_size=2, dataset={data})\n'
        f'val_dataloader = dict(dataset={data})\n'
        f'test_dataloader = dict(dataset={data})\n'
        f'val_evaluator = test_evaluator = {file}\n'
        'train_cfg = dict(max_epochs=1)\n')
    return str(path)


def all_calls(folder):
    """A cheap call of every tool, and the trainings that name weights."""
    config = write_config(folder, 'config.py', dict(
        test_cfg=dict(score_thr=0.)))
    weights = write_config(folder, 'weights.py', PRETRAINED)
    torch.save(released_resnet(ACmixResNet(26, base_channels=16)),
               folder / 'released.pth')
    checkpoint = 'run/epoch_1.pth'
    image = 'digits/val/000000.png'
    configs = [str(ROOT / 'configs' / f'{name}.py') for name in FAMILIES]
    return [
        ('make_digits', ['digits', '--num-train', '2', '--num-val', '1',
                         '--image-size', '96']),
        ('check_dataset', [config]),
        ('train', [config, '--work-dir', 'run']),
        ('test', [config, checkpoint, '--work-dir', 'tested']),
        ('compare', ['run', '--out', 'report', '--per-class']),
        ('visualize_attention', [config, checkpoint, '--image', image,
                                 '--position', '20', '20']),
        ('convert_checkpoint', ['released.pth', 'ours.pth']),
        ('get_complexity', [*configs, '--total', '--shape', '64']),
        ('benchmark_local_attention', [
            '--shape', '8', '6', '7', '--num-heads', '2', '--repeats', '1',
            '--no-peers', '--backends', 'auto']),
        ('benchmark_detector', [config, weights, '--shape', '64',
                                '--repeats', '1']),
        ('mmdet_tool', ['analysis_tools/browse_dataset', config,
                        '--output-dir', 'pictures', '--not-show']),
        ('check_dataset', [weights]),
        ('train', [weights, '--work-dir', 'fetched']),
    ]


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp('network')
    (folder / 'calls.json').write_text(json.dumps(all_calls(folder)))
    done = subprocess.run(
        [sys.executable, HOOK / 'run_tools.py', 'calls.json', 'results.json'],
        cwd=folder, env=environment(folder), text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / 'results.json').read_text())


@pytest.mark.slow
def test_no_tool_uses_the_network(results):
    *calls, fetching = results
    for tool, status, attempts in calls:
        assert attempts == [] and status == 0, (tool, status, attempts)
    # the demo: see above
    assert {tool for tool, *_ in calls} == {
        path.stem for path in (ROOT / 'tools').glob('*.py')} - {'demo'}


@pytest.mark.slow
def test_training_that_cannot_fetch_its_weights_ends_with_their_name(results):
    tool, status, attempts = results[-1]
    address = r'https://download.pytorch.org/models/(resnet18-\w+.pth)'
    assert re.search(f'^error: checkpoint {address} could not be fetched: ',
                     status)
    where, = attempts
    name = re.fullmatch(f'urllib.Request {address}', where).group(1)
    assert status.endswith(os.path.join('torch/hub/checkpoints', name))


ATTEMPTS = """
import http.client, os, socket, subprocess, sys, threading, urllib.request
import torch
CHILD = "import socket; socket.create_connection(('192.0.2.9', 80))"
web = 'http://example.com/x.pth'
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for attempt in (
        lambda: urllib.request.urlopen(web),
        lambda: http.client.HTTPConnection('192.0.2.1').request('GET', '/'),
        lambda: socket.create_connection(('example.com', 80)),
        lambda: socket.socket().connect(('192.0.2.2', 80)),
        lambda: socket.gethostbyname('example.org'),
        lambda: udp.sendto(b'', ('192.0.2.3', 53)),
        lambda: subprocess.run(['wget', web]),
        lambda: torch.hub.load_state_dict_from_url(web),
        lambda: subprocess.run([sys.executable, '-c', CHILD], check=True,
                               stderr=subprocess.DEVNULL)):
    try:
        attempt()
    except (OSError, subprocess.CalledProcessError):
        continue
    sys.exit('an attempt was not refused')
# what stays on the machine is not refused
server = socket.create_server(('localhost', 0))
client = socket.create_connection(('localhost', server.getsockname()[1]))
a, b = socket.socketpair()
a.sendall(b'x'); b.recv(1)
assert urllib.request.urlopen('data:,x').read() == b'x'
subprocess.run([sys.executable, '-c', ''], check=True)
"""


def test_refusal_catches_every_way_out(tmp_path):
    # requests and the like go through getaddrinfo too
    done = subprocess.run(
        [sys.executable, '-c', ATTEMPTS], cwd=tmp_path, text=True,
        env=environment(tmp_path), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'attempts').read_text().splitlines() == [
        'urllib.Request http://example.com/x.pth',
        'socket.getaddrinfo 192.0.2.1',
        'socket.getaddrinfo example.com',
        'socket.connect 192.0.2.2',
        'socket.gethostbyname example.org',
        'socket.sendto 192.0.2.3',
        'subprocess.Popen wget',
        'urllib.Request http://example.com/x.pth',
        'socket.getaddrinfo 192.0.2.9',
    ]


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No names are resolved, and nothing was downloaded before."""

    def fail(*args, **kwargs):
        raise socket.gaierror(-2, 'Name or service not known')

    monkeypatch.setattr(socket, 'getaddrinfo', fail)
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    for name in ('http_proxy', 'https_proxy', 'HTTP_PROXY', 'HTTPS_PROXY'):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / 'hub' / 'checkpoints'


@pytest.mark.parametrize('cls', [ACmixResNet, ResNet])
def test_weights_without_network_are_named_with_both_ways_out(cls, offline):
    address = 'torchvision://resnet18'

    def build(checkpoint):
        return cls(depth=18, base_channels=16, init_cfg=dict(
            type='Pretrained', checkpoint=checkpoint))

    model = build(address)  # touches nothing
    with pytest.raises(FaultError, match='https://download.* could not be '
                       'fetched: .*Name or service not known.* local file'
                       ) as caught:
        model.init_weights()
    place = Path(str(caught.value).rpartition(': ')[2])
    assert place.parent == offline
    weights = ResNet(18, base_channels=16).state_dict()
    torch.save(weights, place)
    local = str(offline / 'mine.pth')
    torch.save(weights, local)
    for checkpoint in (address, local):
        model = build(checkpoint)
        model.init_weights()
        assert torch.equal(model.conv1.weight, weights['conv1.weight'])


@pytest.mark.parametrize('address', ['https://example.com/x.pth?a=1',
                                     'http://example.com/x.pth'])
def test_address_that_cannot_be_reached_is_named(address, offline):
    with pytest.raises(FaultError, match=re.escape(f'checkpoint {address} ')):
        CheckpointLoader.load_checkpoint(address)
