"""Load mmengine's checkpoints with torch's weights-only unpickler.

Beside tensors and plain types an mmengine checkpoint holds log buffers: HistoryBuffer objects made of
numpy arrays. torch >= 2.6 refuses them unless they are allowed by name. One name in the files is
`builtins.getattr` (pickle reaches HistoryBuffer's methods through it); it is mapped to a function that
returns these methods and nothing else.
"""
import os.path as osp
import pickle
import re
import struct

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader

from .faults import FaultError

_STATISTICS = ('min', 'max', 'mean', 'current')

# The functions by which numpy rebuilds arrays and scalars, wherever this version keeps them.
_RECONSTRUCT = np.zeros(0).__reduce__()[0]
_SCALAR = np.float64(0).__reduce__()[0]


def get_history_buffer_method(owner, name):
    """Stand-in for `getattr` in checkpoints: only HistoryBuffer's own statistics.

    Raises:
        pickle.UnpicklingError: Anything else was asked for.
    """
    if owner is HistoryBuffer and name in _STATISTICS:
        return getattr(owner, name)
    raise pickle.UnpicklingError(f'GLOBAL builtins.getattr was called for {name!r} of {owner!r}')


def checkpoint_globals():
    """List what a checkpoint may name, in the form of `torch.serialization.safe_globals`."""
    dtypes = {type(np.dtype(code)) for code in '?bBhHiIlLqQefdFD'}
    return [
        HistoryBuffer, np.ndarray, np.dtype, *sorted(dtypes, key=lambda dtype: dtype.__name__),
        (get_history_buffer_method, 'builtins.getattr'),
        # numpy 1 and numpy 2 names: a file may come from the other one.
        *((_RECONSTRUCT, f'numpy.{core}.multiarray._reconstruct') for core in ('core', '_core')),
        *((_SCALAR, f'numpy.{core}.multiarray.scalar') for core in ('core', '_core')),
    ]


def load_from_local(filename, map_location=None):
    """Load a checkpoint file without running code that it names.

    Args:
        filename (str): Path of the file.
        map_location (str, optional): As in `torch.load`. Defaults to None.

    Returns:
        dict: The checkpoint.

    Raises:
        FileNotFoundError: There is no such file.
        pickle.UnpicklingError: The file names a class or function that is not allowed.
        FaultError: The file is broken.
    """
    filename = osp.expanduser(filename)
    if not osp.isfile(filename):
        raise FileNotFoundError(f'{filename} can not be found.')
    with torch.serialization.safe_globals(checkpoint_globals()):
        try:
            # weights_only stays unset: True by default, and torch's environment variable still counts.
            return torch.load(filename, map_location=map_location)
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(_explain(filename, str(error))) from error
        # the rest is what bytes that are no checkpoint happen to raise
        except (RuntimeError, EOFError, OSError, LookupError, ValueError, struct.error) as error:
            raise FaultError(
                f'checkpoint {filename} cannot be read; it was perhaps cut off while it was written. Resume from an '
                f'earlier one of its folder (--resume CHECKPOINT). torch says: {error}') from error


def _explain(filename, error):
    refused = re.search(r'GLOBAL (\S+)', error)
    return (f'checkpoint {filename} was not loaded: '
            + (f'it uses {refused.group(1)}, and ' if refused else '')
            + 'only tensors, plain types and the log buffers of mmengine are read from a checkpoint, '
            'because anything else can run code. If you trust the file, make a copy that holds only '
            'tensors:\n    python -c "import torch; c = torch.load('
            f"{filename!r}, map_location='cpu', weights_only=False); "
            "torch.save({'state_dict': c.get('state_dict', c)}, 'weights.pth')\"\n"
            'or, to resume from it, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 for that one run.\n'
            f'torch says: {error}')


def register_local_loader():
    """Make mmengine read local checkpoints with `load_from_local`."""
    CheckpointLoader.register_scheme(prefixes='', loader=load_from_local, force=True)
