"""Keep the checkpoints that are there until the next one is complete.

mmengine 0.10.7 removes the oldest and the previous best checkpoint before it writes their successors, and writes
them, and the name of the last one, in place. A disk that fills up, or a kill, leaves half a file for `--resume`,
or nothing at all.
"""
import functools
import glob
import inspect
import os
import os.path as osp
from contextlib import contextmanager, suppress

import mmengine.runner
import mmengine.runner.checkpoint
import mmengine.runner.runner
from mmengine.config import Config
from mmengine.fileio import LocalBackend
from mmengine.hooks import CheckpointHook, checkpoint_hook
from mmengine.visualization import LocalVisBackend

from .faults import MAKE_ROOM, FaultError, is_local

NUM_NAMED = 3


def _not_saved(path, error):
    kept = sorted(glob.glob(osp.join(glob.escape(osp.dirname(path)), '*.pth')), key=osp.getmtime)
    names = ', '.join(map(osp.basename, kept[-NUM_NAMED:]))
    return FaultError(f'{path} was not saved: {error.strerror or error}. '
                      f'The last complete checkpoints beside it: {names or "none"}. {MAKE_ROOM}')


@contextmanager
def whole_file(path):
    """Let a file appear under its name only when it is complete and on the disk.

    Args:
        path (str): The file. A link stays a link.

    Yields:
        str: Path to write to, in the same folder.

    Raises:
        FaultError: The file could not be written. What was at `path` is still there.
    """
    target = osp.realpath(path)
    partial = f'{target}.partial'
    try:
        yield partial
        with open(partial, 'rb') as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError as error:
        raise _not_saved(path, error) from error
    finally:
        with suppress(OSError):
            os.remove(partial)


@contextmanager
def _open_whole(path, mode):
    with whole_file(path) as partial, open(partial, mode) as file:
        yield file


class _Postponed:
    """A file backend that notes what to remove."""

    def __init__(self, backend):
        self.backend = backend
        self.removals = []

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def remove(self, path):
        self.removals.append((self.backend.remove, path))

    def rmtree(self, path):
        self.removals.append((self.backend.rmtree, path))


def _save_first(save):
    """Make a method of CheckpointHook remove files after it has saved the new ones."""

    @functools.wraps(save)
    def save_first(self, *args, **kwargs):
        backend = self.file_backend
        self.file_backend = postponed = _Postponed(backend)
        try:
            save(self, *args, **kwargs)
        finally:
            self.file_backend = backend
        best = getattr(self, 'best_ckpt_path_dict', {}).values()
        current = {self.last_ckpt, getattr(self, 'best_ckpt_path', None), *best}
        for remove, path in postponed.removals:
            if path not in current:  # written again under its old name
                remove(path)

    return save_first


def _save_whole(save):
    """Make `mmengine.runner.save_checkpoint` write local files whole."""

    @functools.wraps(save)
    def save_checkpoint(checkpoint, filename, file_client_args=None, backend_args=None):
        if file_client_args is not None or not is_local(filename, backend_args):
            save(checkpoint, filename, file_client_args, backend_args)
            return
        with whole_file(filename) as partial:
            save(checkpoint, partial, backend_args=backend_args)

    return save_checkpoint


def _name_file(write, argument):
    """Make a function say which file it could not write; Python says so only of files that do not open."""
    parameters = inspect.signature(write)

    @functools.wraps(write)
    def write_named(*args, **kwargs):
        try:
            return write(*args, **kwargs)
        except OSError as error:
            if error.filename is None:
                error.filename = parameters.bind(*args, **kwargs).arguments.get(argument)
            raise

    return write_named


def enable_safe_saving():
    """Let mmengine keep old checkpoints until the new one is complete, and name what a full disk hinders."""
    save = mmengine.runner.checkpoint.save_checkpoint
    if hasattr(save, '__wrapped__'):
        return
    for module in (mmengine.runner.checkpoint, mmengine.runner.runner, mmengine.runner):
        module.save_checkpoint = _save_whole(save)
    checkpoint_hook.open = _open_whole  # it opens nothing but last_checkpoint
    for name in ('_save_checkpoint_with_step', '_save_best_checkpoint'):
        setattr(CheckpointHook, name, _save_first(getattr(CheckpointHook, name)))
    for owner, name, argument in ((Config, 'dump', 'file'), (LocalVisBackend, '_dump', 'file_path'),
                                  (LocalBackend, 'put', 'filepath'), (LocalBackend, 'put_text', 'filepath')):
        setattr(owner, name, _name_file(getattr(owner, name), argument))
