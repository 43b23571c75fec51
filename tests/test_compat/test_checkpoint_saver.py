"""Checkpoints when the disk fills up while they are written."""
import errno
import os
import shutil

import pytest
import torch
from mmengine import runner
from mmengine.config import Config
from mmengine.fileio import LocalBackend, dump
from mmengine.hooks import CheckpointHook
from mmengine.runner import CheckpointLoader, save_checkpoint
from mmengine.visualization import LocalVisBackend

from acmix_det.compat.checkpoint_saver import enable_safe_saving, whole_file
from acmix_det.compat.faults import FaultError, end_with_message
from tests.test_compat.test_checkpoint_loader import epochs, make_runner


class Disk:
    """Fills up at a file whose name begins with `full`; notes what lies beside a file when it is first written."""

    def __init__(self, folder):
        self.folder = folder
        self.full = 'no file'
        self.seen = {}

    def names(self):
        return sorted(path.name for path in self.folder.iterdir() if path.suffix == '.pth')

    def put(self, backend, obj, filepath):
        name = os.path.basename(filepath)
        self.seen.setdefault(name, self.names())
        full = name.startswith(self.full)
        with open(filepath, 'wb') as file:
            file.write(obj[:len(obj) // 2] if full else obj)
        if full:
            raise no_space()


def no_space():
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(tmp_path, monkeypatch):
    disk = Disk(tmp_path)
    monkeypatch.setattr(LocalBackend, 'put', lambda *args: disk.put(*args))
    # later epochs are better
    monkeypatch.setattr('tests.test_compat.test_checkpoint_loader.Mean.compute_metrics',
                        lambda self, results: dict(mean=next(disk.scores)))
    disk.scores = iter([1., 2., 3., 4.])
    return disk


def train(folder, max_epochs, **kwargs):
    made = make_runner(folder, train_cfg=epochs(max_epochs), **kwargs)
    hook, = (hook for hook in made.hooks if isinstance(hook, CheckpointHook))
    hook.max_keep_ckpts = 1
    made.train()
    return made


def test_old_checkpoints_are_removed_after_the_new_ones_are_complete(disk):
    train(disk.folder, 2)
    assert disk.names() == ['best_output_mean_epoch_2.pth', 'epoch_2.pth']
    assert {'best_output_mean_epoch_1.pth', 'epoch_1.pth'} <= set(disk.seen['epoch_2.pth.partial'])
    assert 'best_output_mean_epoch_1.pth' in disk.seen['best_output_mean_epoch_2.pth.partial']


@pytest.mark.parametrize('full, kept', [
    ('epoch_2', ['best_output_mean_epoch_1.pth', 'epoch_1.pth']),
    ('best_output_mean_epoch_2', ['best_output_mean_epoch_1.pth', 'epoch_2.pth']),
], ids=['last', 'best'])
def test_full_disk_leaves_what_is_complete_and_the_training_resumes(full, kept, disk):
    disk.full = full
    with pytest.raises(FaultError) as caught:
        train(disk.folder, 2)
    message = str(caught.value)
    assert message.startswith(f'{disk.folder}/{full}.pth was not saved: No space left on device. '
                              'The last complete checkpoints beside it: ')
    assert all(name in message for name in kept)
    assert disk.names() == kept and not list(disk.folder.glob('*.partial'))
    last = (disk.folder / 'last_checkpoint').read_text()
    assert last == f'{disk.folder}/{kept[1]}'
    for name in kept:
        assert 'fc.weight' in CheckpointLoader.load_checkpoint(str(disk.folder / name))['state_dict']
    disk.full = 'no file'
    assert train(disk.folder, 3, resume=True).iter == 6
    assert disk.names() == ['best_output_mean_epoch_3.pth', 'epoch_3.pth']


def test_only_the_newest_three_checkpoints_are_named(disk):
    for i in range(7, 12):
        (disk.folder / f'epoch_{i}.pth').touch()
        os.utime(disk.folder / f'epoch_{i}.pth', (i, i))
    disk.full = 'epoch_12'
    with pytest.raises(FaultError, match='beside it: epoch_9.pth, epoch_10.pth, epoch_11.pth. Make room'):
        save_checkpoint(dict(a=1), str(disk.folder / 'epoch_12.pth'))
    shutil.rmtree(disk.folder)
    disk.folder.mkdir()
    with pytest.raises(FaultError, match='beside it: none. Make room; --resume then continues'):
        save_checkpoint(dict(a=1), str(disk.folder / 'epoch_12.pth'))


def test_name_of_the_last_checkpoint_is_written_whole(disk, monkeypatch):
    train(disk.folder, 1)
    replace = os.replace

    def fail(source, target):
        if target.endswith('last_checkpoint'):
            assert open(source).read() == f'{disk.folder}/epoch_2.pth'
            raise no_space()
        replace(source, target)

    monkeypatch.setattr(os, 'replace', fail)
    with pytest.raises(FaultError, match='last_checkpoint was not saved: No space left'):
        train(disk.folder, 2, resume=True)
    assert (disk.folder / 'last_checkpoint').read_text() == f'{disk.folder}/epoch_1.pth'
    assert {'epoch_1.pth', 'epoch_2.pth'} <= set(disk.names())
    assert not (disk.folder / 'last_checkpoint.partial').exists()


def test_best_checkpoint_that_is_written_again_is_kept(disk):
    trained = train(disk.folder, 1)
    hook, = (hook for hook in trained.hooks if isinstance(hook, CheckpointHook))
    hook.after_val_epoch(trained, {'output/mean': 9.})
    assert disk.names() == ['best_output_mean_epoch_1.pth', 'epoch_1.pth']


def test_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    path = tmp_path / 'a.pth'
    path.write_text('old')
    events = []
    fsync = os.fsync
    monkeypatch.setattr(os, 'fsync', lambda number: (events.append(('sync', path.read_text())), fsync(number)))
    with whole_file(str(path)) as partial:
        with open(partial, 'w') as file:
            file.write('new')
    assert events == [('sync', 'old')] and path.read_text() == 'new'
    assert os.listdir(tmp_path) == ['a.pth']


def test_what_stops_the_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / 'a.pth'
    path.write_text('old')
    with pytest.raises(KeyboardInterrupt), whole_file(str(path)) as partial:
        open(partial, 'w').close()
        raise KeyboardInterrupt
    assert path.read_text() == 'old' and os.listdir(tmp_path) == ['a.pth']


def test_rest_of_a_killed_process_is_written_over(tmp_path):
    (tmp_path / 'a.pth.partial').write_bytes(b'x' * 99999)
    save_checkpoint(dict(w=torch.ones(1)), str(tmp_path / 'a.pth'))
    assert CheckpointLoader.load_checkpoint(str(tmp_path / 'a.pth'))['w'] == 1
    assert os.listdir(tmp_path) == ['a.pth']


def test_link_stays_a_link(tmp_path):
    (tmp_path / 'big_disk').mkdir()
    (tmp_path / 'a.pth').symlink_to(tmp_path / 'big_disk/a.pth')
    save_checkpoint(dict(a=1), str(tmp_path / 'a.pth'))
    assert (tmp_path / 'a.pth').is_symlink() and os.listdir(tmp_path / 'big_disk') == ['a.pth']


@pytest.mark.parametrize('filename, kwargs', [
    ('s3://bucket/a.pth', {}), ('a.pth', dict(backend_args=dict(backend='remote'))),
    ('a.pth', dict(file_client_args=dict(backend='remote')))], ids=['address', 'backend', 'client'])
def test_other_backends_get_their_file_under_its_name(filename, kwargs, monkeypatch):
    put = []

    class Remote:

        def put(self, obj, path):
            put.append(path)

    monkeypatch.setattr('mmengine.runner.checkpoint.FileClient.infer_client', lambda *args: Remote())
    monkeypatch.setattr('mmengine.runner.checkpoint.get_file_backend', lambda *args, **kwargs: Remote())
    save_checkpoint(dict(a=1), filename, **kwargs)
    assert put == [filename]


class Full:
    """A file on a full disk: it opens, and takes nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def write(self, content):
        raise no_space()


@pytest.mark.parametrize('name, write', [
    ('a.py', lambda path: Config(dict(a=1)).dump(path)),
    ('a.json', lambda path: LocalVisBackend('.')._dump(dict(a=1), file_path=path, file_format='json')),
    ('a.json', lambda path: dump(dict(a=1), path)),
    ('a.pkl', lambda path: dump(dict(a=1), path)),
], ids=['config', 'scalars', 'json', 'pickle'])
def test_other_files_of_a_full_disk_are_named(name, write, tmp_path, monkeypatch):
    path = str(tmp_path / name)
    monkeypatch.setattr('builtins.open', Full)
    with pytest.raises(SystemExit) as caught, end_with_message():
        write(path)
    assert caught.value.code == (f'error: {path} was not written: No space left on device. Make room; --resume then '
                                 'continues from the last complete checkpoint')


def test_name_that_an_error_has_is_kept(tmp_path):
    (tmp_path / 'a').touch()
    with pytest.raises(OSError) as caught:
        LocalBackend().put(b'', str(tmp_path / 'a/b/c.json'))
    assert caught.value.filename in (f'{tmp_path}/a', f'{tmp_path}/a/b')


def test_second_installation_changes_nothing():
    functions = [runner.save_checkpoint, CheckpointHook._save_best_checkpoint, LocalBackend.put]
    enable_safe_saving()
    assert functions == [runner.save_checkpoint, CheckpointHook._save_best_checkpoint, LocalBackend.put]


@pytest.mark.parametrize('error, message', [
    (PermissionError(errno.EACCES, 'Permission denied', 'a'), 'error: a: Permission denied'),
    (FileExistsError(errno.EEXIST, 'File exists', 'a'), 'error: a: File exists'),
    (no_space(), 'error: a file of the work dir was not written: No space left on device. ')],
    ids=['permission', 'file', 'no name'])
def test_folder_or_disk_that_takes_no_file_ends_with_a_message(error, message):
    with pytest.raises(SystemExit) as caught, end_with_message():
        raise error
    assert caught.value.code.startswith(message)


@pytest.mark.parametrize('error', [KeyError('a'), FileNotFoundError(errno.ENOENT, 'No such file', 'a'),
                                   PermissionError('no file')], ids=['key', 'missing', 'no name'])
def test_other_errors_keep_their_traceback(error):
    with pytest.raises(type(error)) as caught, end_with_message():
        raise error
    assert caught.value is error


def test_message_of_a_worker_loses_its_traceback():
    with pytest.raises(SystemExit) as caught, end_with_message():
        raise FaultError('Caught FaultError in DataLoader worker process 0.\nOriginal Traceback (most recent call '
                         'last):\n  ...\nacmix_det.compat.faults.FaultError: image a.png: cut\n')
    assert caught.value.code == 'error: image a.png: cut'
