"""Faults that no program can mend: a full disk, a broken file, data that do not fit the config."""
import errno
import sys
from contextlib import contextmanager

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MAKE_ROOM = 'Make room; --resume then continues from the last complete checkpoint'


class FaultError(RuntimeError):
    """Names the file or argument at fault and the way out; its message needs no traceback."""


class MissingFileError(FaultError, FileNotFoundError):
    """A file that the data need is not there."""


@contextmanager
def end_with_message():
    """End the script with exit status 1 and one message, without a traceback, on a FaultError or a full disk."""
    try:
        yield
    except FaultError as error:
        # A worker of a data loader puts its own traceback before the message.
        sys.exit('error: ' + str(error).rpartition(f'{FaultError.__name__}: ')[2].rstrip())
    except OSError as error:
        if error.errno not in FULL or error.filename is None:
            raise
        sys.exit(f'error: {error.filename} was not written: {error.strerror}. {MAKE_ROOM}')


def is_local(path, backend_args=None):
    """Say whether mmengine looks for a file on this machine.

    Args:
        path (str): Path or address of the file.
        backend_args (dict, optional): As in `mmengine.fileio.get`. Defaults to None.
    """
    return '://' not in path and (backend_args or {}).get('backend', 'local') == 'local'
