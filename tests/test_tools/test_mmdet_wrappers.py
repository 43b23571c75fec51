import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import cv2
import mmdet
import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer

from acmix_det.compat import mmdet_tools

TOOLS = Path(__file__).resolve().parents[2] / 'tools'


@pytest.fixture
def argv(monkeypatch):
    """Let a test run scripts in this process: argv and path are put back afterwards."""
    monkeypatch.setattr(sys, 'argv', list(sys.argv))
    monkeypatch.setattr(sys, 'path', list(sys.path))

    def start(script, *args):
        sys.argv = [str(script), *map(str, args)]
        runpy.run_path(str(script), run_name='__main__')

    return start


@pytest.mark.parametrize('name, description', [('train', 'Train a detector'),
                                               ('test', 'MMDet test (and eval) a model')])
def test_wrapper_shows_the_help_of_the_script_of_mmdet(name, description, argv, capsys):
    with pytest.raises(SystemExit) as caught:
        argv(TOOLS / f'{name}.py', '--help')
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f'usage: {name}.py ') and description in out and '--cfg-options' in out


def test_script_sees_itself_as_started_by_its_path(argv, tmp_path, monkeypatch):
    tools = tmp_path / 'tools'
    (tools / 'misc').mkdir(parents=True)
    for name in ('train', 'test', 'misc/show'):
        (tools / f'{name}.py').write_text(
            'import json, sys\n'
            'seen = [__name__, __file__, sys.argv, sys.path[0]]\n'
            f'json.dump(seen, open({str(tmp_path / "seen")!r}, "w"))\n')
    monkeypatch.setattr(mmdet, '__file__', str(tmp_path / 'mmdet' / '__init__.py'))  # a checkout
    argv(TOOLS / 'mmdet_tool.py', 'show.py', 'config.py', '--cfg-options', 'a=1')
    script = str(tools / 'misc' / 'show.py')
    assert json.loads((tmp_path / 'seen').read_text()) == [
        '__main__', script, [script, 'config.py', '--cfg-options', 'a=1'], str(tools / 'misc')]


def test_missing_scripts_of_mmdet_are_reported_with_both_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(mmdet, '__file__', str(tmp_path / 'mmdet' / '__init__.py'))
    with pytest.raises(FileNotFoundError, match=r'(?s)mmdet/\.mim/tools, .*tools'):
        mmdet_tools.available_tools()


@pytest.mark.parametrize('name', ['analysis_tools/get_flops', 'get_flops', 'get_flops.py'])
def test_tool_is_found_by_path_and_by_name(name):
    assert mmdet_tools.find_mmdet_tool(name).parts[-2:] == ('analysis_tools', 'get_flops.py')


@pytest.mark.parametrize('args, problem', [((), 'NAME is missing'),
                                           (('no_such', ), "got 'no_such'")], ids=['none', 'unknown'])
def test_tool_without_a_known_name_lists_what_there_is(args, problem, argv):
    with pytest.raises(SystemExit) as caught:
        argv(TOOLS / 'mmdet_tool.py', *args)
    assert problem in caught.value.code
    assert '\n  analysis_tools/browse_dataset\n' in caught.value.code


def test_help_of_the_tool_lists_what_there_is(argv, capsys):
    argv(TOOLS / 'mmdet_tool.py', '--help')
    assert '\n  analysis_tools/browse_dataset\n' in capsys.readouterr().out


def test_publish_model_reads_a_checkpoint_with_log_buffers(argv, tmp_path):
    torch.save(dict(state_dict=dict(w=torch.ones(2)), optimizer=dict(a=1),
                    message_hub=dict(log_scalars=dict(loss=HistoryBuffer([1.0], [1])))),
               tmp_path / 'epoch_1.pth')
    argv(TOOLS / 'mmdet_tool.py', 'publish_model', tmp_path / 'epoch_1.pth', tmp_path / 'out.pth')
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob('out-*.pth')) and time.monotonic() < deadline:
        time.sleep(0.05)  # the script leaves the renaming to `mv` and does not wait for it
    published, = tmp_path.glob('out-*.pth')
    content = torch.load(published, weights_only=True)
    assert content['state_dict']['w'].tolist() == [1, 1] and 'optimizer' not in content


CONFIG = """
_base_ = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)
norm = dict(type='GN', num_groups=4, requires_grad=True)
model = dict(
    backbone=dict(depth=18, base_channels=8, stem_channels=8, frozen_stages=-1, norm_cfg=norm,
                  norm_eval=False, init_cfg=None),
    neck=dict(in_channels=[8, 16, 32, 64], out_channels=8),
    bbox_head=dict(num_classes=1, in_channels=8, feat_channels=8, stacked_convs=1))
data = dict(data_root='{root}/', ann_file='annotations.json', metainfo=dict(classes=('square', )),
            data_prefix=dict(img=''))
pipeline = [dict(type='LoadImageFromFile'), dict(type='Resize', scale=(64, 64)),
            dict(type='LoadAnnotations', with_bbox=True),
            dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape',
                                                  'scale_factor'))]
loader = dict(batch_size=2, num_workers=0, persistent_workers=False)
train_dataloader = dict(dataset=dict(pipeline=pipeline, filter_cfg=dict(min_size=1), **data), **loader)
val_dataloader = dict(dataset=dict(pipeline=pipeline, **data), **loader)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file='{root}/annotations.json')
test_evaluator = val_evaluator
train_cfg = dict(max_epochs=1)
"""


@pytest.fixture
def tiny_coco(tmp_path):
    images, annotations = [], []
    for i in range(4):
        picture = np.zeros((64, 64, 3), np.uint8)
        picture[10:40, 10 + i:40 + i] = 255
        cv2.imwrite(str(tmp_path / f'{i}.png'), picture)
        images.append(dict(id=i, file_name=f'{i}.png', width=64, height=64))
        annotations.append(dict(id=i + 1, image_id=i, category_id=1, bbox=[10 + i, 10, 30, 30],
                                area=900, iscrowd=0))
    (tmp_path / 'annotations.json').write_text(json.dumps(
        dict(images=images, annotations=annotations, categories=[dict(id=1, name='square')])))
    config = tmp_path / 'config.py'
    config.write_text(CONFIG.replace('{root}', str(tmp_path)))
    return config


def run(*args):
    done = subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_detector_trains_with_the_script_of_mmdet_and_resumes_and_tests_with_ours(tiny_coco, tmp_path):
    work_dir = tmp_path / 'work'
    run(mmdet_tools.mmdet_tools_dir() / 'train.py', tiny_coco, '--work-dir', work_dir)
    resumed = run(TOOLS / 'train.py', tiny_coco, '--work-dir', work_dir, '--resume', '--cfg-options',
                  'train_cfg.max_epochs=2')
    assert 'resumed epoch: 1, iter: 2' in resumed
    assert (work_dir / 'epoch_2.pth').is_file()
    tested = run(TOOLS / 'test.py', tiny_coco, work_dir / 'epoch_2.pth', '--work-dir', work_dir)
    assert f'Load checkpoint from {work_dir / "epoch_2.pth"}' in tested
