"""Faults of disks and data end tools/train.py and tools/test.py with one message."""
import errno
import json
import math
import os
import resource
import runpy
import shutil
import sys
from types import SimpleNamespace

import pytest
from mmengine.visualization import vis_backend

from acmix_det.datasets import make_digits
from tests.test_tools.digits_training import ROOT, start, write_config


@pytest.fixture(scope='module')
def digits(tmp_path_factory):
    root = tmp_path_factory.mktemp('digits') / 'digits'
    make_digits(str(root), num_train=8, num_val=4, image_size=96)
    return root


@pytest.fixture
def run(digits, tmp_path, monkeypatch):
    """Run a tool in this process, on a data set that a test may damage."""
    monkeypatch.setattr(sys, 'argv', list(sys.argv))
    monkeypatch.setattr(sys, 'path', list(sys.path))
    shutil.copytree(digits, tmp_path / 'digits')
    number = 0

    def start(*args, extra='', tool='train'):
        """Message of the exit, None if there is none, and the log."""
        nonlocal number
        number += 1
        # mmengine keeps what has a name as long as the process lives
        name = f'{tmp_path.name}_{number}'
        config = write_config(
            tmp_path / f'{name}.py', tmp_path / 'digits',
            extra=f'{extra}visualizer = dict(name={name!r})\n')
        work_dir = tmp_path / 'work'
        sys.argv = [f'{tool}.py', str(config), *args, '--work-dir',
                    str(work_dir)]
        message = None
        try:
            runpy.run_path(str(ROOT / 'tools' / f'{tool}.py'),
                           run_name='__main__')
        except SystemExit as caught:
            message = caught.code
        logs = sorted(work_dir.glob('*/*.log'), key=os.path.getmtime)
        return message, logs[-1].read_text() if logs else ''

    return SimpleNamespace(
        start=start, work_dir=tmp_path / 'work',
        train=tmp_path / 'digits/train', val=tmp_path / 'digits/val',
        ann_file=tmp_path / 'digits/annotations/train.json')


def change(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def losses(work_dir):
    """Losses of every iteration that was logged."""
    path, = work_dir.glob('*/vis_data/scalars.json')
    lines = map(json.loads, path.read_text().splitlines())
    return [x for x in lines if 'loss' in x]


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_file()
                  and not path.name.endswith('.py'))


KEEP_ONE = 'default_hooks["checkpoint"] = dict(max_keep_ckpts=1)\n'


@pytest.mark.slow
def test_full_disk_leaves_the_previous_checkpoint_to_resume_from(run):
    one_epoch = 'train_cfg["max_epochs"] = 1\n'
    assert run.start(extra=KEEP_ONE + one_epoch)[0] is None
    before = (run.work_dir / 'epoch_1.pth').read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, limits[1]))
    try:
        message, log = run.start('--resume', extra=KEEP_ONE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 'Epoch(train) [2][2/2]' in log
    reason = os.strerror(errno.EFBIG)
    assert f'{run.work_dir}/epoch_2.pth was not saved: {reason}. ' in message
    assert 'complete checkpoints beside it: epoch_1.pth' in message
    assert '--resume then continues' in message
    assert names(run.work_dir) == ['epoch_1.pth', 'last_checkpoint']
    assert (run.work_dir / 'epoch_1.pth').read_bytes() == before

    message, log = run.start('--resume', extra=KEEP_ONE)
    assert message is None
    assert 'resumed epoch: 1, iter: 2' in log
    assert 'Epoch(train) [2][2/2]' in log
    assert names(run.work_dir) == ['epoch_2.pth', 'last_checkpoint']


def test_full_disk_names_the_log_that_was_not_written(run, monkeypatch):

    def dump(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(vis_backend, 'dump', dump)
    message, _ = run.start()
    assert message.endswith(
        '.json was not written: No space left on device. Make room; --resume '
        'then continues from the last complete checkpoint')
    assert f'error: {run.work_dir}/' in message


@pytest.mark.parametrize('split', ['train', 'val'])
def test_missing_image_ends_a_training_before_its_first_batch(split, run):
    (getattr(run, split) / '000003.png').unlink()
    message, log = run.start()
    assert message == (
        f'error: 1 image files of {run.ann_file.parent}/{split}.json are '
        f'missing, the first is {getattr(run, split)}/000003.png. '
        'python tools/check_dataset.py CONFIG lists all that is wrong')
    assert 'Epoch(' not in log


def test_missing_image_ends_an_evaluation(run):
    (run.val / '000000.png').unlink()
    message, _ = run.start('none.pth', tool='test')
    assert '1 image files of' in message
    assert f'the first is {run.val}/000000.png' in message


@pytest.mark.slow
def test_image_that_cannot_be_decoded_is_named_by_a_worker(digits, tmp_path):
    shutil.copytree(digits, tmp_path / 'digits')
    path = tmp_path / 'digits/train/000003.png'
    path.write_bytes(b'')
    config = write_config(tmp_path / 'config.py', tmp_path / 'digits',
                          extra='train_dataloader["num_workers"] = 1\n')
    process = start(config, tmp_path / 'work')
    out = process.communicate()[0]
    assert process.returncode == 1
    assert f'error: image {path} cannot be decoded' in out.splitlines()[-1]
    assert 'Traceback' not in out


def test_broken_annotation_file_ends_a_training(run):
    run.ann_file.write_bytes(run.ann_file.read_bytes()[:500])
    message, _ = run.start()
    assert message.startswith('error: ann_file must be a COCO file, got '
                              f'{run.ann_file}: broken JSON: line ')
    assert message.endswith('python tools/check_dataset.py CONFIG lists all '
                            'that is wrong') and '\n' not in message


def test_broken_annotation_file_ends_an_evaluation(run):
    path = run.ann_file.with_name('val.json')
    path.write_text('[')
    message, _ = run.start('none.pth', tool='test')
    assert f'ann_file must be a COCO file, got {path}: broken JSON' in message


@pytest.mark.parametrize('kept', [0, 1], ids=['all', 'some'])
def test_training_on_background_has_finite_losses_and_ends(kept, run):
    change(run.ann_file, lambda c: c.update(annotations=[
        a for a in c['annotations'] if a['image_id'] < kept]))
    message, _ = run.start(extra='train_dataloader["batch_size"] = 2\n'
                           'train_cfg["max_epochs"] = 1\n'
                           'log_processor = dict(window_size=1)\n')
    assert message is None
    logged = losses(run.work_dir)
    assert len(logged) == 4
    assert all(math.isfinite(x[key]) for x in logged
               for key in ('loss', 'loss_cls', 'loss_bbox', 'grad_norm'))
    assert sum(x['loss_bbox'] == 0 for x in logged) == 4 - kept
    assert (run.work_dir / 'epoch_1.pth').is_file()


def test_filter_that_leaves_no_image_ends_a_training(run):
    change(run.ann_file, lambda c: c.update(annotations=[]))
    message, _ = run.start(extra='train_dataloader["dataset"]["filter_cfg"] ='
                           'dict(filter_empty_gt=True)\n')
    assert (f"filter_cfg must leave images of {run.ann_file}, got filter_cfg="
            "{'filter_empty_gt': True, 'min_size': 1}, which leaves none"
            ) in message


def classes(names):
    return ''.join(f'{x}_dataloader["dataset"]["metainfo"] = '
                   f'dict(classes={names!r})\n' for x in ('train', 'val'))


def test_classes_that_are_no_categories_are_refused_with_both_lists(run):
    given = list('abcdefghij')
    message, log = run.start(extra=classes(given))
    assert message == (f'error: classes must be categories of {run.ann_file}, '
                       f'got classes={given}, and the categories are '
                       f"{list('0123456789')}")
    assert 'Epoch(' not in log


def test_last_class_that_is_no_category_gives_a_warning(run):
    message, log = run.start(
        extra=classes(list('012345678a')) + 'train_cfg["max_epochs"] = 1\n')
    assert message is None
    for split in ('train', 'val'):
        assert (f"WARNING - {run.ann_file.parent}/{split}.json: the classes "
                "['a'] are no categories") in log


def test_work_dir_that_is_a_file_is_named(run):
    run.work_dir.touch()
    assert run.start()[0] == f'error: {run.work_dir}: File exists'
